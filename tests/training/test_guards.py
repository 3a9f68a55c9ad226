"""Steps that are refused, and losses that end a training."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import fit
from tiny_world import build, tiny_batch

from dspark_lab.records import Batch
from dspark_lab.training.guards import SpikeGuard, StopOnNonFiniteLoss


def guard(**overrides: Any) -> SpikeGuard:
    return SpikeGuard(**{"max_ratio": 4.0, "window": 5, "max_skipped": 2, **overrides})


def warmed_up(**overrides: Any) -> SpikeGuard:
    """After as many steps of norm 1 and loss 2 as the window holds."""
    made = guard(**overrides)
    for step in range(made.window):
        assert not made.refuses(step=step, loss=2.0, gradient_norm=1.0)
    return made


@pytest.mark.parametrize(
    ("loss", "gradient_norm", "refused"),
    [
        (2.0, 4.0, False),  # up to the ratio
        (2.0, 4.01, True),
        (8.0, 1.0, False),
        (8.01, 1.0, True),
        (0.0, 0.0, False),
        (2.0, float("inf"), True),
        (2.0, float("nan"), True),
        (float("nan"), 1.0, True),
    ],
)
def test_what_is_refused(loss: float, gradient_norm: float, refused: bool):
    watching = warmed_up()
    assert watching.refuses(step=5, loss=loss, gradient_norm=gradient_norm) is refused
    assert watching.num_skipped == refused


def test_the_median_follows_accepted_steps_and_no_refused_ones():
    watching = warmed_up()
    for step in range(5, 10):  # the window is now full of norm 3
        assert not watching.refuses(step=step, loss=2.0, gradient_norm=3.0)
    assert watching.refuses(step=10, loss=2.0, gradient_norm=100.0)
    assert watching.refuses(step=11, loss=2.0, gradient_norm=12.1)
    assert not watching.refuses(step=12, loss=2.0, gradient_norm=12.0)


def test_before_the_window_is_full_only_what_is_not_finite_is_refused():
    watching = guard()
    for step, norm in enumerate([1.0, 100.0, 1.0, 1.0]):
        assert not watching.refuses(step=step, loss=2.0, gradient_norm=norm)
    assert watching.refuses(step=4, loss=2.0, gradient_norm=float("inf"))
    assert not watching.refuses(step=5, loss=2.0, gradient_norm=1.0)


def test_too_many_in_a_row_end_the_training_with_step_value_and_median():
    watching = warmed_up(max_skipped=2)
    for step in (5, 6):
        assert watching.refuses(step=step, loss=2.0, gradient_norm=50.0)
    assert not watching.refuses(step=7, loss=2.0, gradient_norm=1.0)  # the row is broken
    for step in (8, 9):
        assert watching.refuses(step=step, loss=2.0, gradient_norm=50.0)
    with pytest.raises(ValueError, match=r"gradient norm is 77 at step 10, its median .* 1: .*max_skipped=2"):
        watching.refuses(step=10, loss=2.0, gradient_norm=77.0)
    assert watching.num_skipped == 5


def test_the_state_is_carried_over_a_resume():
    watching, resumed = warmed_up(), guard()
    assert watching.refuses(step=5, loss=2.0, gradient_norm=50.0)
    resumed.load_state_dict(watching.state_dict())
    assert resumed.state_dict() == watching.state_dict()
    assert resumed.refuses(step=6, loss=2.0, gradient_norm=50.0)
    with pytest.raises(ValueError, match="3 steps in a row"):
        resumed.refuses(step=7, loss=2.0, gradient_norm=50.0)


@pytest.mark.parametrize("wrong", [{"max_ratio": 1.0}, {"window": 0}, {"max_skipped": -1}])
def test_ranges(wrong: dict[str, Any]):
    ((key, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{key}={value}"):
        guard(**wrong)


def test_refusals_are_logged(tmp_path: Path):
    watching = guard()
    watching.num_skipped = 3
    trainer = fit(build("dflash"), tmp_path, [watching], steps=1)
    assert float(trainer.logged_metrics["train/skipped_steps"]) == 3.0


def spoiled() -> Batch:
    batch = tiny_batch()
    return replace(batch, hidden_states=torch.full_like(batch.hidden_states, float("nan")), epoch=7)


def test_a_nan_loss_stops_and_leaves_its_rows(tmp_path: Path):
    with pytest.raises(ValueError, match=r"train/loss is nan at step 2, rows \[40, 41\] of epoch 7 .*step_2\.pt"):
        batches = [tiny_batch(), tiny_batch(), spoiled()]
        fit(build("dflash"), tmp_path, [StopOnNonFiniteLoss(run_dir=tmp_path)], steps=3, batches=batches)
    saved = torch.load(tmp_path / "non_finite_step_2.pt", weights_only=True)
    batch = spoiled()
    for field in fields(Batch):
        found, value = saved[field.name], getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            assert torch.allclose(found.double(), value.double(), equal_nan=True), field.name
        else:
            assert found == value, field.name
    assert saved["step"] == 2 and saved["loss"] != saved["loss"]
