"""The learning rate over a run, for the shapes of ``conf/lr_schedule``."""

from typing import Any

import pytest
import torch

from dspark_lab.training.lr_schedules import LrSchedule

SHAPES: dict[str, dict[str, Any]] = {
    "cosine": {"decay_share": None, "decay_shape": "cosine", "final_share": 0.1},
    "linear": {"decay_share": None, "decay_shape": "linear", "final_share": 0.1},
    "constant": {"decay_share": 0.0, "decay_shape": "linear", "final_share": 1.0},
    "wsd": {"decay_share": 0.2, "decay_shape": "linear", "final_share": 0.1},
}


def schedule(shape: str = "cosine", **overrides: Any) -> LrSchedule:
    return LrSchedule(**{"warmup_share": 0.1, **SHAPES[shape], **overrides})


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_warms_up_alike(shape: str):
    factors = [schedule(shape).factor(step, num_steps=100) for step in range(11)]
    assert factors == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])


@pytest.mark.parametrize(
    ("shape", "step", "expected"),
    [
        ("cosine", 55, 0.55),  # half-way down the cosine is the mean
        ("cosine", 100, 0.1),
        ("cosine", 250, 0.1),
        ("linear", 55, 0.55),
        ("linear", 28, 0.82),
        ("linear", 250, 0.1),
        ("constant", 99, 1.0),
        ("constant", 250, 1.0),
        ("wsd", 80, 1.0),
        ("wsd", 90, 0.55),
        ("wsd", 95, 0.325),
        ("wsd", 100, 0.1),
    ],
)
def test_what_follows_the_warm_up(shape: str, step: int, expected: float):
    """100 steps, a tenth of them warm-up; WSD decays over the last 20."""
    assert schedule(shape).factor(step, num_steps=100) == pytest.approx(expected)


def test_cosine_at_a_quarter():
    found = schedule(warmup_share=0.2, final_share=0.0).factor(40, num_steps=100)
    assert found == pytest.approx(0.5 * (1 + 2**-0.5))


@pytest.mark.parametrize("shape", SHAPES)
def test_up_then_never_up_again(shape: str):
    factors = [schedule(shape, warmup_share=0.25).factor(step, num_steps=40) for step in range(41)]
    assert factors[:10] == sorted(factors[:10])
    assert factors[9:] == sorted(factors[9:], reverse=True)
    assert all(0 < factor <= 1 for factor in factors)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_run_of_a_step_or_two_learns_at_the_peak_first(shape: str, num_steps: int):
    assert schedule(shape).factor(0, num_steps=num_steps) == 1.0


def test_no_warmup_starts_at_the_peak():
    assert schedule(warmup_share=0.0).factor(0, num_steps=10) == 1.0


def test_built_schedule_drives_every_group():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=2.0)
    built = schedule(warmup_share=0.4).build(optimizer, num_steps=10)
    rates = []
    for _ in range(10):
        rates.append({group["lr"] for group in optimizer.param_groups})
        optimizer.step()
        built.step()
    assert [rate.pop() for rate in rates[:4]] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert all(len(rate) == 1 for rate in rates[4:])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"warmup_share": -0.1}, r"warmup_share=-0.1 must lie in \[0, 1\)"),
        ({"warmup_share": 1.0}, r"warmup_share=1.0 must lie in \[0, 1\)"),
        ({"decay_share": 0.95}, r"decay_share=0.95 must lie in \[0, 1 - warmup_share=0.9\]"),
        ({"decay_share": -0.5}, "decay_share=-0.5"),
        ({"final_share": 1.5}, "final_share=1.5"),
        ({"decay_share": 0.0}, "final_share=0.1 is never reached with decay_share=0"),
        ({"decay_shape": "square"}, "decay_shape"),
    ],
)
def test_values_out_of_range_name_their_key(overrides: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        schedule(**overrides)
