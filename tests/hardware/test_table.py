"""Measured profiles: monotone, a staircase with a jump, linear beyond, refused far outside."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from accelerators import served

from dspark_lab.hardware.deployment import deploy
from dspark_lab.hardware.protocol import StepShape
from dspark_lab.hardware.table import Curve, MeasuredHardware, Measurement, TableProfile, TimedDraft, TimedStep


def shipped() -> Measurement:
    return MeasuredHardware(name="measured", path="deepseek_v4_flash_b300_tp4", memory_bytes=None).measurement


def verify_ms(profile: TableProfile, num_tokens: int) -> float:
    return 1e3 * float(profile.verify_time_s(StepShape(1, num_tokens)))


def test_the_shipped_curve_is_read_exactly() -> None:
    profile = TableProfile.fit(shipped())
    for num_tokens, published in ((1, 5.2), (64, 8.2), (128, 9.9), (256, 12.5), (1024, 20.6), (1025, 104.5)):
        assert verify_ms(profile, num_tokens) == pytest.approx(published, abs=0.05)
    for num_requests, published in ((1, 0.92), (64, 2.3), (256, 5.4)):
        assert 1e3 * profile.draft_time_s(num_requests=num_requests) == pytest.approx(published, abs=0.05)
    assert profile.mape == 0
    assert "Apache-2.0" in shipped().notice


def test_a_staircase_pads_to_the_next_graph_and_jumps_above_the_last() -> None:
    profile = TableProfile.fit(shipped())
    assert verify_ms(profile, 5) == verify_ms(profile, 8) == pytest.approx(5.592)
    assert verify_ms(profile, 1100) == pytest.approx(104.489)
    assert 104.489 < verify_ms(profile, 3000) < 133.452  # interpolated above the graphs
    beyond = [verify_ms(profile, n) for n in (16384, 20000, 30000)]
    assert beyond[0] < beyond[1] < beyond[2]
    assert (beyond[2] - beyond[1]) / 10000 == pytest.approx((beyond[1] - beyond[0]) / 3616)


def test_times_never_fall() -> None:
    found = TableProfile.fit(shipped()).verify_time_s(StepShape(1, np.arange(1, 20000)))
    assert (np.diff(found) >= 0).all()


def test_one_slow_outlier_does_not_lift_all_that_follow() -> None:
    seconds = [36.8, 33, 29, 27.7, 28, 29, 30.5, 31.9]
    curve = Curve.fit(range(1, 9), seconds, [1] * 8, None)
    assert curve(1) == pytest.approx(np.mean(seconds[:6]), rel=0.02)
    assert curve(8) == pytest.approx(31.9)


def test_without_graphs_it_interpolates() -> None:
    curve = Curve.fit([1, 3], [1.0, 2.0], [1, 1], None)
    assert [float(curve(n)) for n in (0, 1, 2, 3, 5)] == pytest.approx([1.0, 1.0, 1.5, 2.0, 3.0])


def grid(noise: float = 0.0) -> Measurement:
    """Steps of 10 ms + 0.1 ms a token, 0.3 ms a request, 1 us a context token."""
    generator = np.random.default_rng(0)
    steps = []
    for requests in (1, 2, 4):
        for tokens in (1, 4, 8):
            for context in (64, 512):
                seconds = 10e-3 + 0.1e-3 * requests * tokens + 0.3e-3 * requests + 1e-6 * requests * context
                steps.append(
                    TimedStep(
                        num_requests=requests,
                        num_tokens=requests * tokens,
                        num_context_tokens=requests * context,
                        time_s=seconds * float(1 + noise * generator.standard_normal()),
                    )
                )
    return Measurement(name="grid", target="tiny", num_gpus=1, steps=tuple(steps))


def test_what_varies_apart_from_tokens_has_a_slope_of_its_own() -> None:
    profile = TableProfile.fit(grid())
    assert profile.request_s == pytest.approx(0.3e-3, rel=0.05)
    assert profile.context_token_s == pytest.approx(1e-6, rel=0.05)
    shape = StepShape(3, 12, 0, 900)
    assert float(profile.verify_time_s(shape)) == pytest.approx(10e-3 + 1.2e-3 + 0.9e-3 + 0.9e-3, rel=0.03)
    assert TableProfile.fit(grid(noise=0.03)).mape < 0.05


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (StepShape(1, 200), "up to 32 tokens a step and cannot tell 200"),
        (StepShape(20, 20), "up to 4 requests a step and cannot tell 20"),
        (StepShape(1, 1, 0, 10_000), "up to 2048 context tokens a step and cannot tell 10000"),
        (StepShape(1, 1, 500), "up to 32 tokens a step and cannot tell 501"),
    ],
)
def test_far_outside_it_refuses(shape: StepShape, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TableProfile.fit(grid()).verify_time_s(shape)


def test_a_little_outside_it_says_so() -> None:
    profile = TableProfile.fit(grid())
    assert profile.extrapolated(StepShape(4, 32, 0, 2048)) is None
    assert profile.extrapolated(StepShape(1, 40)) == "extrapolated: num_tokens 40 > 32"


def test_unsteady_points_are_left_out_and_counted() -> None:
    measured = grid()
    wild = replace(measured.steps[-1], time_s=1.0, iqr_s=0.9)
    profile = TableProfile.fit(replace(measured, steps=(*measured.steps, wild)))
    assert profile.num_unsteady == 1
    assert profile.mape < 0.01


def test_it_comes_back_from_its_file(tmp_path: Path) -> None:
    measured = replace(grid(), drafts=(TimedDraft(num_requests=1, time_s=2e-3),))
    measured.save(tmp_path / "profile.json")
    for path in (tmp_path, tmp_path / "profile.json"):
        assert MeasuredHardware(name="measured", path=str(path), memory_bytes=None).measurement == measured
    assert TableProfile.fit(measured).draft_time_s(num_requests=3) == pytest.approx(6e-3)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_file_with_impossible_times_is_refused(tmp_path: Path, seconds: float) -> None:
    grid().save(tmp_path / "profile.json")
    data = json.loads((tmp_path / "profile.json").read_text())
    data["steps"][0]["time_s"] = seconds
    (tmp_path / "profile.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"profile\.json: not readable.*takes no positive time"):
        MeasuredHardware(name="measured", path=str(tmp_path), memory_bytes=None)


def test_what_is_no_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no shipped profile \(deepseek_v4_flash_b300_tp4\)"):
        MeasuredHardware(name="measured", path="nowhere", memory_bytes=None)
    (tmp_path / "profile.json").write_text('{"schema": 9}')
    with pytest.raises(ValueError, match="its schema is not 1"):
        MeasuredHardware(name="measured", path=str(tmp_path), memory_bytes=None)


def test_without_a_drafter_there_is_no_draft_time() -> None:
    with pytest.raises(ValueError, match="grid has no draft times"):
        TableProfile.fit(grid()).draft_time_s(num_requests=1)


def test_a_profile_of_another_target_is_refused() -> None:
    hardware = MeasuredHardware(name="measured", path="deepseek_v4_flash_b300_tp4", memory_bytes=1e12)
    common = {"drafter": None, "memory_utilisation": 0.9}
    with pytest.raises(ValueError, match="profile of target 'deepseek_v4_flash', this run has target=kimi_k3"):
        deploy(hardware, target_name="kimi_k3", target=None, num_gpus=None, **common)
    with pytest.raises(ValueError, match=r"num_gpus=8: .* was measured on 4"):
        deploy(hardware, target_name="deepseek_v4_flash", target=None, num_gpus=8, **common)
    with pytest.raises(ValueError, match=r"memory_bytes is set, but target\.serving"):
        deploy(hardware, target_name="deepseek_v4_flash", target=None, num_gpus=None, **common)
    found = deploy(
        hardware, target_name="deepseek_v4_flash", target=served("deepseek_v4_flash"), num_gpus=None, **common
    )
    assert found.num_gpus == 4
    assert found.room is not None
    assert "measured table" in found.told
