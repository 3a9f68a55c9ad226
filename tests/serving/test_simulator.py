"""The step loop against closed forms, and what must hold whatever the hardware."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
from engines import FixedLength, Linear, accepting, run, workload

from dspark_lab.hardware.protocol import Floats, Ints
from dspark_lab.hardware.served import Capacity
from dspark_lab.hardware.table import MeasuredHardware, TableProfile
from dspark_lab.records import ConfidenceSource
from dspark_lab.scheduler.protocol import Load
from dspark_lab.serving.log import Log
from dspark_lab.serving.metrics import serving_metrics
from dspark_lab.serving.simulator import Limits

ENGINE = Limits(num_requests=256, batch_tokens=8192)


def value(log: Log, name: str, warmup_s: float = 10.0) -> float:
    found = serving_metrics([log], warmup_s=warmup_s, num_gpus=1)[name].value
    assert found is not None
    return found


def test_constant_steps_without_drafts() -> None:
    log = run(load=8, profile=Linear(fixed_s=0.01))
    assert value(log, "output_tokens_per_s") == pytest.approx(800, rel=0.01)
    assert value(log, "tokens_per_s_per_user") == pytest.approx(100, rel=0.01)
    assert value(log, "acceptance_length") == 1.0
    assert serving_metrics([log], warmup_s=10.0, num_gpus=1)["wasted_verification"].value is None


@pytest.mark.parametrize("length", [2.5, 4.64])
def test_constant_steps_with_drafts(length: float) -> None:
    log = run(
        load=8, acceptance=accepting(length, num_requests=400), workload=workload(output_tokens=2000), duration_s=200
    )
    assert value(log, "output_tokens_per_s") == pytest.approx(8 * length / 0.01, rel=0.015)
    assert value(log, "acceptance_length") == pytest.approx(length, rel=0.015)
    assert value(log, "verified_tokens_per_step") == 7
    assert value(log, "wasted_verification") == pytest.approx(1 - (length - 1) / 7, rel=0.03)


def test_without_luck_drafts_only_cost() -> None:
    never = accepting(1.0001)
    log = run(load=8, acceptance=never, profile=Linear(fixed_s=0.01, token_s=1e-4))
    assert value(log, "output_tokens_per_s") == pytest.approx(8 / (0.01 + 64e-4), rel=0.01)


def test_drafting_takes_its_time() -> None:
    free, dear = (
        value(run(acceptance=accepting(3.0), profile=Linear(draft_s=draft_s)), "tokens_per_s_per_user")
        for draft_s in (0.0, 0.01)
    )
    assert dear == pytest.approx(free / 2, rel=0.02)


def lindley(arrivals: Sequence[float], service: float) -> Floats:
    """Times in the system of a queue for one: each starts when it arrives, or when the one before it is done."""
    done, stays = 0.0, []
    for arrival in arrivals:
        done = max(done, arrival) + service
        stays.append(done - arrival)
    return np.array(stays)


@pytest.mark.parametrize("utilisation", [0.3, 0.7])
def test_a_queue_for_one_waits_as_a_queue_does(utilisation: float) -> None:
    """M/D/1: W = S + rho S / (2 (1 - rho)), S = output tokens x T since prefill emits the first one."""
    service = 2 * 0.01
    asked = workload(arrivals="poisson", output_tokens=2)
    load = utilisation / service

    def arrivals(seed: int) -> list[float]:
        drawn = asked.first_requests(load, until_s=100, generator=np.random.default_rng(seed))
        return [request.asked_s for request in drawn]

    log = run(load=load, workload=asked, limits=Limits(num_requests=1, batch_tokens=8192), duration_s=100, seed=3)
    stays = log.done_s - log.asked_s
    assert stays == pytest.approx(lindley(arrivals(3), service)[: len(stays)])

    expected = service + utilisation * service / (2 * (1 - utilisation))
    mean = np.mean([lindley(arrivals(seed), service).mean() for seed in range(60)])
    assert mean == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("arrivals", "load"), [("closed", 24), ("poisson", 3.0)])
def test_littles_law(arrivals: str, load: float) -> None:
    log = run(
        load=load,
        workload=workload(arrivals=arrivals, prompt_tokens=100, output_tokens=150, spread="exponential"),
        acceptance=accepting(3.0),
        profile=Linear(0.01, 1e-4),
        duration_s=200,
        seed=3,
    )
    present = (log.present * log.step_s).sum() / log.end_s[-1]
    inside = log.done_s < log.duration_s
    rate = inside.sum() / log.duration_s
    stay = (log.done_s - log.asked_s)[inside].mean()
    assert present == pytest.approx(rate * stay, rel=0.03)
    if arrivals == "closed":
        assert present == pytest.approx(load, rel=0.01)


@dataclass
class Confident:
    """Verifies what it is more than half sure of."""

    confidence: ConfidenceSource | None = "head"

    def draft_lengths(self, confidence: Floats | None, load: Load, *, num_draft_tokens: int) -> Ints:
        assert confidence is not None
        assert confidence.shape == (load.num_requests, num_draft_tokens)
        assert load.request_ids is not None
        assert len(load.request_ids) == load.num_requests
        return (np.cumprod(confidence, 1) > 0.5).sum(1)


def test_without_a_drafter_every_scheduler_is_the_same() -> None:
    logs = [run(scheduler=scheduler, load=4) for scheduler in (None, FixedLength(3), Confident())]
    for log in logs[1:]:
        np.testing.assert_array_equal(log.end_s, logs[0].end_s)
        np.testing.assert_array_equal(log.emitted, logs[0].emitted)


def test_where_verifying_is_free_more_is_never_worse() -> None:
    table = accepting(4.0)
    rates = [
        value(run(acceptance=table, scheduler=FixedLength(k), load=8), "output_tokens_per_s") for k in (0, 1, 3, 5, 7)
    ]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(value(run(acceptance=table, load=8), "output_tokens_per_s"), rel=1e-9)


def test_where_a_token_costs_a_step_none_is_best() -> None:
    table = accepting(4.0)
    profile = Linear(fixed_s=0.0, token_s=0.01)
    rates = [
        value(run(acceptance=table, scheduler=FixedLength(k), profile=profile, load=2), "output_tokens_per_s")
        for k in (0, 1, 3, 7)
    ]
    assert rates == sorted(rates, reverse=True)


@dataclass
class Knowing:
    confidence: Literal["acceptance"] = "acceptance"

    def draft_lengths(self, confidence: Floats | None, load: Load, *, num_draft_tokens: int) -> Ints:
        assert confidence is not None
        return confidence.sum(1).astype(np.int64)


def test_one_who_knows_wastes_nothing() -> None:
    table = accepting(3.0)
    log = run(acceptance=table, scheduler=Knowing(), load=8)
    assert value(log, "wasted_verification") == 0.0
    assert value(log, "acceptance_length") == pytest.approx(value(run(acceptance=table, load=8), "acceptance_length"))


def test_a_longer_draft_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="asks for 9 to 9 of 7"):
        run(acceptance=accepting(3.0), scheduler=FixedLength(9))


def test_prompts_wait_their_turn_and_are_chunked() -> None:
    log = run(
        load=4,
        workload=workload(prompt_tokens=1000, output_tokens=50),
        limits=Limits(num_requests=8, batch_tokens=300),
        profile=Linear(0.001, 1e-4),
    )
    tokens = log.num_requests + log.num_prefill
    assert tokens.max() <= 300
    assert log.num_prefill.max() > 290
    assert log.num_prefill.sum() == pytest.approx(1000 * log.first.sum(), rel=0.02)
    shared = value(log, "tokens_per_s_per_user")
    free = run(
        load=4,
        workload=workload(prompt_tokens=1000, output_tokens=50),
        limits=Limits(num_requests=8, batch_tokens=300, prefill="free"),
        profile=Linear(0.001, 1e-4),
    )
    assert free.num_prefill.sum() == 0
    assert value(free, "tokens_per_s_per_user") > 1.5 * shared
    assert value(free, "time_to_first_token_s_p50") == 0.0


def test_memory_limits_how_many_run() -> None:
    room = Capacity(free_bytes=10 * 1201, bytes_per_token=1.0, bytes_per_request=1000.0)
    log = run(load=32, workload=workload(prompt_tokens=1, output_tokens=200), room=room)
    assert log.num_requests.max() == 10
    assert log.present.max() == 32
    assert value(log, "time_to_first_token_s_p50") > 3.0
    with pytest.raises(ValueError, match="use more GPUs or shorter requests"):
        run(room=Capacity(free_bytes=100, bytes_per_token=1.0, bytes_per_request=0.0))


@dataclass(frozen=True)
class Broken(Linear):
    def verify_time_s(self, shape):
        return np.asarray(self.fixed_s)


@pytest.mark.parametrize("seconds", [0.0, -0.1, float("nan"), float("inf")])
def test_a_step_that_takes_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="step times are positive"):
        run(profile=Broken(fixed_s=seconds))


def test_a_batch_too_small_for_the_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_tokens=100 cannot hold 64 requests of 8 tokens"):
        run(acceptance=accepting(3.0), limits=Limits(num_requests=64, batch_tokens=100))


def test_equal_seeds_give_equal_logs_and_others_do_not() -> None:
    facts = {
        "acceptance": accepting(3.0),
        "workload": workload(arrivals="poisson", spread="lognormal"),
        "load": 2.0,
        "duration_s": 30.0,
    }
    one, same, other = (run(seed=seed, **facts) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.end_s, same.end_s)
    np.testing.assert_array_equal(one.emitted, same.emitted)
    assert one.end_s.shape != other.end_s.shape or not np.array_equal(one.end_s, other.end_s)


def test_waiting_at_the_door_is_part_of_the_first_token() -> None:
    log = run(load=1, workload=workload(frontend_s=0.2, client_gap_s=0.5, output_tokens=10))
    assert value(log, "time_to_first_token_s_p50") == pytest.approx(0.2 + 0.01)
    gaps = np.sort(log.asked_s)[1:] - np.sort(log.done_s)[:-1][: len(log.asked_s) - 1]
    assert gaps == pytest.approx(0.5)


def test_intervals_hold_the_value_and_narrow_with_seeds() -> None:
    logs = [run(load=4, acceptance=accepting(3.0, concentration=4.0), seed=seed, duration_s=40.0) for seed in range(4)]
    one, four = (serving_metrics(kept, warmup_s=5.0, num_gpus=1)["output_tokens_per_s"] for kept in (logs[:1], logs))
    assert four.low is not None and four.high is not None and one.low is not None and one.high is not None
    assert four.low < four.value < four.high  # type: ignore[operator]
    assert four.high - four.low < one.high - one.low


def test_the_warm_up_must_leave_a_window() -> None:
    with pytest.raises(ValueError, match="warmup_s=60"):
        serving_metrics([run()], warmup_s=60.0, num_gpus=1)


def test_it_is_quick() -> None:
    """160 simulated seconds at concurrency 64, on the published curve, in under 2 seconds."""
    profile = TableProfile.fit(
        MeasuredHardware(name="measured", path="deepseek_v4_flash_b300_tp4", memory_bytes=None).measurement
    )
    facts = {
        "profile": profile,
        "acceptance": accepting(3.8),
        "workload": workload(prompt_tokens=500, output_tokens=500),
        "scheduler": FixedLength(5),
        "load": 64,
        "duration_s": 160.0,
    }
    start = time.process_time()
    log = run(**facts)
    assert time.process_time() - start < 2.0
    assert len(log.end_s) > 5000
