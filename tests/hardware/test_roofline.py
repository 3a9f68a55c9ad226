"""The data-sheet model: its terms by hand, its growth, its calibration, and the memory it needs."""

from dataclasses import replace

import numpy as np
import pytest
from accelerators import DATA_SHEETS, accelerator, drafter, served

from dspark_lab.hardware.accelerator import Accelerator, Calibration, Observation
from dspark_lab.hardware.calibrated import Timed, calibrate, calibrate_published, timed_round
from dspark_lab.hardware.deployment import deploy
from dspark_lab.hardware.protocol import StepShape
from dspark_lab.hardware.roofline import Roofline
from dspark_lab.hardware.served import capacity, fewest_gpus

TARGET = {name: served(name) for name in ("kimi_k3", "qwen3_8b")}


def roofline(hardware: str, target: str, num_gpus: int, **costs: float) -> Roofline:
    found = accelerator(hardware)
    return Roofline(
        accelerator=found,
        target=TARGET[target],
        num_gpus=num_gpus,
        costs=replace(found.costs, **costs),
        drafter=drafter(),
    )


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_every_data_sheet_builds_and_says_its_sources(name: str) -> None:
    found = accelerator(name)
    assert isinstance(found, Accelerator)
    assert found.name == name
    assert all(found.sources.values())


def test_a_figure_without_a_source_is_refused() -> None:
    found = accelerator("h100")
    told = {key: text for key, text in found.sources.items() if key != "flops"}
    with pytest.raises(ValueError, match="sources has none for flops"):
        replace(found, sources=told)


def test_distinct_experts_as_a_simulation_counts_them() -> None:
    experts = TARGET["kimi_k3"].experts
    assert experts is not None
    generator = np.random.default_rng(0)
    for num_tokens, expected in ((1, 16), (8, 120.3), (144, 829)):
        drawn = [
            len(np.unique([generator.choice(896, 16, replace=False) for _ in range(num_tokens)])) for _ in range(40)
        ]
        assert float(experts.covered(num_tokens)) == pytest.approx(expected, rel=0.001)
        assert np.mean(drawn) == pytest.approx(expected, rel=0.01)


def test_one_token_of_a_dense_target_by_hand() -> None:
    profile = roofline("h100", "qwen3_8b", 1, dense_efficiency=1.0, layer_floor_s=0.0, context_efficiency=1.0)
    read = (7.5681e9 * 2 + 1000 * 147456) / 3.35e12
    multiplied = 2 * 7.5681e9 / (0.989e15 * 0.3)
    expected = (read**4 + multiplied**4) ** 0.25
    assert float(profile.verify_time_s(StepShape(1, 1, 0, 1000))) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("hardware", "target", "num_gpus"), [("gb300_nvl72", "kimi_k3", 8), ("h200", "qwen3_8b", 2)])
def test_times_grow_with_every_number(hardware: str, target: str, num_gpus: int) -> None:
    profile = roofline(hardware, target, num_gpus)
    base = StepShape(4, 20, 64, 8000)
    for bigger in (replace(base, num_requests=5), replace(base, num_prefill_tokens=65),
                   replace(base, num_context_tokens=9000)):  # fmt: skip
        assert float(profile.verify_time_s(bigger)) >= float(profile.verify_time_s(base))
    many = profile.verify_time_s(replace(base, num_verify_tokens=np.arange(4, 600)))
    assert many.shape == (596,)
    assert (np.diff(many) > 0).all()
    assert profile.draft_time_s(num_requests=9) >= profile.draft_time_s(num_requests=1) > 0


def test_more_gpus_read_less_each() -> None:
    shape = StepShape(1, 1)
    one, two = (roofline("h100", "qwen3_8b", n, layer_floor_s=0.0) for n in (1, 2))
    assert float(two.verify_time_s(shape)) < float(one.verify_time_s(shape))


def test_a_sequential_drafter_pays_each_pass() -> None:
    profile = roofline("h100", "qwen3_8b", 1)
    five = replace(profile, drafter=drafter(num_passes=5))
    assert five.draft_time_s(num_requests=1) == pytest.approx(5 * profile.draft_time_s(num_requests=1))


def test_what_cannot_be_modelled_is_refused() -> None:
    with pytest.raises(ValueError, match="num_gpus=16: h100 links 8"):
        roofline("h100", "qwen3_8b", 16)
    found = replace(accelerator("cpu"), flops={"fp32": 1e11})
    with pytest.raises(ValueError, match="compute='bf16' of the target: cpu has no figure"):
        Roofline(accelerator=found, target=TARGET["qwen3_8b"], num_gpus=1, costs=found.costs)


def test_too_little_memory_says_how_many_gpus_it_takes() -> None:
    found, target = accelerator("gb300_nvl72"), TARGET["kimi_k3"]
    with pytest.raises(ValueError, match=r"num_gpus=4: gb300_nvl72 has 298 GB a GPU.*at least 8 GPUs"):
        capacity(found, target, drafter(), num_gpus=4, memory_utilisation=0.9)
    assert fewest_gpus(found, target, drafter(), memory_utilisation=0.9) == 8
    with pytest.raises(ValueError, match="does not fit into the 8 GPUs that h100 links"):
        fewest_gpus(accelerator("h100"), target, None, memory_utilisation=0.9)


def test_the_drafter_takes_its_share_of_the_memory() -> None:
    found, target = accelerator("h100"), TARGET["qwen3_8b"]
    alone = capacity(found, target, None, num_gpus=1, memory_utilisation=0.9)
    drafted = capacity(
        found, target, drafter(parameters=1e9, context_bytes_per_token=20480.0), num_gpus=1, memory_utilisation=0.9
    )
    assert alone.free_bytes - drafted.free_bytes == pytest.approx(2e9)
    assert drafted.needed_bytes(1000) - alone.needed_bytes(1000) == pytest.approx(20480 * 1000)


def test_calibration_finds_the_costs_that_made_the_observations() -> None:
    truth = roofline("b300", "kimi_k3", 8, step_floor_s=3e-3, expert_novelty=0.4, token_s=2e-6)
    observed = [
        Timed(shape=shape, time_s=float(truth.verify_time_s(shape)), num_gpus=8)
        for shape in (StepShape(1, 1), StepShape(1, 9), StepShape(8, 40), StepShape(32, 200), StepShape(4, 512))
    ]
    bounds = {"step_floor_s": (0.0, 0.02), "expert_novelty": (0.01, 1.0), "token_s": (0.0, 1e-4)}
    found = calibrate(roofline("b300", "kimi_k3", 8), observed, fitted=bounds)
    assert found.roofline.costs.step_floor_s == pytest.approx(3e-3, rel=1e-3)
    assert found.roofline.costs.expert_novelty == pytest.approx(0.4, rel=1e-3)
    assert found.fit is not None
    assert found.fit.mape < 1e-4
    assert found.fit.left_out_mape is not None
    assert found.fit.left_out_mape < 1e-3
    assert not found.fit.on_bounds


def test_a_cost_that_its_bounds_hold_back_is_named() -> None:
    truth = roofline("b300", "kimi_k3", 8, step_floor_s=0.0)
    observed = [
        Timed(shape=StepShape(1, n), time_s=0.9 * float(truth.verify_time_s(StepShape(1, n))), num_gpus=8)
        for n in (1, 2)
    ]
    found = calibrate(truth, observed, fitted={"step_floor_s": (0.0, 0.02)})
    assert found.fit is not None
    assert found.fit.on_bounds == ("step_floor_s",)
    assert "on a bound: step_floor_s" in str(found.fit)


def test_outside_its_observations_a_calibrated_profile_says_so() -> None:
    hardware = accelerator("gb300_nvl72")
    common = {"target": TARGET["kimi_k3"], "drafter": drafter(), "memory_utilisation": 0.9}
    found = deploy(hardware, target_name="kimi_k3", num_gpus=None, **common)
    assert found.num_gpus == 8
    assert "4 costs fitted to 4 observations" in found.told
    assert found.profile.extrapolated(StepShape(1, 8, 0, 1000)) is None
    assert found.profile.extrapolated(StepShape(2, 16, 0, 500)) == (
        "extrapolated: num_requests 2 > 1, num_tokens 16 > 8"
    )
    far = deploy(hardware, target_name="kimi_k3", num_gpus=32, **common)
    assert far.profile.extrapolated(StepShape(1, 1)) == "extrapolated: num_gpus 32"
    bare = deploy(accelerator("h200"), target_name="qwen3_8b", num_gpus=1, **{**common, "target": TARGET["qwen3_8b"]})
    assert bare.profile.extrapolated(StepShape(1, 1)) == "extrapolated: nothing was observed, ±25 %"


def test_plain_decoding_takes_the_floor_of_the_same_observations() -> None:
    hardware = accelerator("gb300_nvl72")
    plain = deploy(
        hardware, target_name="kimi_k3", target=TARGET["kimi_k3"], drafter=None, num_gpus=8, memory_utilisation=0.9
    )
    assert 1 / float(plain.profile.verify_time_s(StepShape(1, 1, 0, 1000))) == pytest.approx(111, rel=0.01)
    with pytest.raises(ValueError, match="no drafter"):
        plain.profile.draft_time_s(num_requests=1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_takes_a_positive_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="positive time"):
        Timed(shape=StepShape(1, 1), time_s=seconds)


def test_a_calibration_names_what_it_cannot_fit() -> None:
    entry = Observation(
        num_gpus=1, num_requests=1, num_draft_tokens=0, acceptance_length=1.0, tokens_per_s_per_user=100.0, source="x"
    )
    assert timed_round(entry).time_s == 0.01
    with pytest.raises(ValueError, match=r"fitted costs \['novelty'\] are unknown"):
        Calibration(fitted={"novelty": (0, 1)}, fitted_by_gpus={}, observations=(entry,))
    with pytest.raises(ValueError, match="observations is empty"):
        Calibration(fitted={}, fitted_by_gpus={}, observations=())


def test_published_points_of_both_topologies_are_met() -> None:
    found = accelerator("gb300_nvl72")
    calibration = found.calibrations["kimi_k3"]
    for num_gpus, plain, drafted in ((8, 111, 331), (16, 118, 370)):
        profile = calibrate_published(roofline("gb300_nvl72", "kimi_k3", num_gpus), calibration)
        one = float(profile.verify_time_s(StepShape(1, 1, 0, 1000)))
        round_s = float(profile.verify_time_s(StepShape(1, 8, 0, 1000))) + profile.draft_time_s(num_requests=1)
        assert 1 / one == pytest.approx(plain, rel=0.03)
        assert 4.73 / round_s == pytest.approx(drafted, rel=0.03)
