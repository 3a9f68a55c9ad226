import itertools

import numpy as np
import pytest
import torch
from curves import CURVES, V4_FLASH, Curve, sps
from enumeration import World, emitted_texts, random_world, target_texts
from hydra import compose, initialize_config_dir

from dspark_lab.configs import config_folder
from dspark_lab.pipeline.build import build_scheduler
from dspark_lab.scheduler.budget import (
    StepCosts,
    admit,
    best_budget,
    convex_minorant,
    first_peak,
    survivals,
    throughputs,
)
from dspark_lab.scheduler.calibrated import Calibrated
from dspark_lab.scheduler.fixed import Fixed, NoDrafts
from dspark_lab.scheduler.hardware_aware import HardwareAware
from dspark_lab.scheduler.oracle import Oracle
from dspark_lab.scheduler.protocol import Load, VerifyScheduler
from dspark_lab.scheduler.threshold import Threshold


def early_stop(hardware, cost_curve="convex"):
    return HardwareAware(hardware=hardware, mode="early_stop", staleness=2, cost_curve=cost_curve, confidence="head")


def global_budget(hardware, staleness=2):
    return HardwareAware(
        hardware=hardware, mode="global_budget", staleness=staleness, cost_curve="convex", confidence="head"
    )


def loaded(num_requests, **others):
    return Load(num_requests, request_ids=np.arange(num_requests), **others)


def lengths_of(scheduler, confidence):
    confidence = np.asarray(confidence, np.float64)
    return scheduler.draft_lengths(confidence, loaded(len(confidence)), num_draft_tokens=confidence.shape[1]).tolist()


def random_confidence(generator, num_requests, num_slots=7):
    """Requests differ, slots of one request are alike; acceptance length 4.0."""
    level = generator.beta(5, 1.6, (num_requests, 1))
    return np.clip(level + 0.1 * generator.standard_normal((num_requests, num_slots)), 0.02, 0.98)


STEEP = Curve((0, 4096), (0.002, 4.098), draft_s=0.001)  # a millisecond a token
CAUSAL = {
    "none": lambda: NoDrafts(),
    "fixed": lambda: Fixed(num_verified_tokens=3),
    "threshold": lambda: Threshold(survival=0.4, confidence="head"),
    "early_stop": lambda: early_stop(STEEP),
    "early_stop measured": lambda: early_stop(STEEP, "measured"),
    "global_budget": lambda: global_budget(STEEP),
    "global_budget of the last step": lambda: global_budget(STEEP, staleness=1),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_slot_is_decided_without_what_comes_from_its_own_draft(name):
    """Confidences after slot k know its draft: changing them leaves the verdict on slots up to k alone."""
    generator, seen = np.random.default_rng(0), set()
    for num_requests in (1, 5, 40):
        for _ in range(30):
            past = [random_confidence(generator, num_requests) for _ in range(2)]
            now = random_confidence(generator, num_requests)
            now[:, 3] = np.where(generator.random(num_requests) < 0.3, 1.0, now[:, 3])  # ties
            request, slot = generator.integers(num_requests), generator.integers(7)
            other = now.copy()
            other[request, slot + 1 :] = generator.choice([0.0, 0.5, 1.0], 6 - slot)
            found = []
            for last in (now, other):
                scheduler = CAUSAL[name]()
                for confidence in (*past, last):
                    lengths = lengths_of(scheduler, confidence)
                found.append(min(lengths[request], slot + 1))
            assert found[0] == found[1]
            seen.update(lengths)
    assert len(seen) > 4 or name in ("none", "fixed")


def test_the_best_budget_of_current_survivals_is_not_causal():
    """So the property above can fail: the same search without staleness."""
    costs = StepCosts(sps(1, 0.5, 0.45))(Load(1), num_draft_tokens=2)
    found = [best_budget(throughputs(np.array([[0.8, 0.8 * c]]), costs)) for c in (0.9, 0.0)]
    assert found == [2, 0]


PAPER = World(
    target=(
        torch.tensor([0.7, 0.3]),
        torch.tensor([[0.6, 0.4], [0.2, 0.8]]),
        torch.full((2, 2, 2), 0.5),
    ),
    drafter=(torch.tensor([0.5, 0.5]), torch.tensor([[0.5, 0.5], [0.3, 0.7]])),
)


def lengths_by_path(world, decide, confidence):
    """``confidence(drafts before the slot)``: what a drafter would say of it."""
    found = []
    for path in world.paths.tolist():
        rows = np.array([[confidence(tuple(path[:k])) for k in range(world.num_slots)]])
        found.append(int(decide(rows)))
    return torch.tensor(found)


def paper_confidence(before):
    return {(): 0.8, (0,): 0.9, (1,): 0.0}[before]


@pytest.mark.parametrize("method", ["token", "block"])
def test_the_papers_counterexample(method):
    """Appendix A: a search without the break says A with .85 where the target says it with .70; ours with .70."""
    curve = sps(1, 0.5, 0.45)
    costs = StepCosts(curve)(Load(1), num_draft_tokens=2)
    assert throughputs(np.array([[0.8, 0.72]]), costs) == pytest.approx([1.0, 0.9, 1.134], abs=1e-6)

    def search(confidence):
        survival = np.cumprod(confidence, axis=1)
        return admit(survival, best_budget(throughputs(survival, costs)))[0]

    def first_token(decide):
        texts = emitted_texts(PAPER, method=method, lengths=lengths_by_path(PAPER, decide, paper_confidence))
        return texts.sum((1, 2))[0].item()

    assert first_token(search) == pytest.approx(0.85, abs=1e-6)
    for scheduler in (
        early_stop(curve, "measured"),
        early_stop(curve),
        Threshold(survival=0.75, confidence="head"),
        Fixed(num_verified_tokens=1),
    ):
        decide = lambda rows, scheduler=scheduler: lengths_of(scheduler, rows)[0]  # noqa: E731
        assert first_token(decide) == pytest.approx(0.70, abs=1e-6)


@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("name", CAUSAL)
def test_whole_texts_are_exactly_the_targets_under_every_scheduler(name, method):
    """Two requests, the other one's confidences fixed; the confidences mean nothing, and need not."""
    world = random_world(seed=11)
    generator = np.random.default_rng(4)
    claimed = {
        before: generator.uniform(0.1, 1.0)
        for k in range(world.num_slots)
        for before in itertools.product(range(3), repeat=k)
    }
    past = [generator.uniform(0.1, 1.0, (2, 3)) for _ in range(2)]
    neighbour = generator.uniform(0.1, 1.0, (1, 3))

    def decide(rows):
        scheduler = CAUSAL[name]()
        for confidence in (*past, np.concatenate([rows, neighbour])):
            lengths = lengths_of(scheduler, confidence)
        return lengths[0]

    lengths = lengths_by_path(world, decide, claimed.__getitem__)
    assert len(set(lengths.tolist())) > 1 or name in ("none", "fixed")
    emitted = emitted_texts(world, method=method, lengths=lengths)
    torch.testing.assert_close(emitted, target_texts(world), rtol=0, atol=1e-6)


def test_golden_early_stop():
    """algorithms.md 5.4: throughputs 2.0, 2.9, 3.2909, 3.5167, 3.5231, then 3.4429."""
    curve = sps(*(1 / (1 + 0.1 * max(0, tokens - 3)) for tokens in range(2, 9)), first=2)
    confidence = np.array([[0.9, 0.8, 0.5], [0.6, 0.4, 0.2]])
    survival = survivals(confidence, scheduler="test")
    found = throughputs(survival, StepCosts(curve)(Load(2), num_draft_tokens=3))
    assert found[:6] == pytest.approx([2.0, 2.9, 3.2909, 3.5167, 3.5231, 3.4429], abs=1e-4)
    assert first_peak(found) == 4
    assert lengths_of(early_stop(curve, "measured"), confidence) == [3, 1]
    assert lengths_of(early_stop(curve), confidence) == [3, 1]


def test_closed_forms():
    confidence = random_confidence(np.random.default_rng(0), 8)
    free, dear = Curve((0, 4096), (0.01, 0.01)), Curve((0, 8, 9), (0.01, 0.01, 1e9))
    for scheduler in (early_stop, global_budget):
        assert lengths_of(scheduler(free), confidence) == [7] * 8
        assert lengths_of(scheduler(dear), confidence) == [0] * 8
    assert lengths_of(early_stop(free, "measured"), confidence) == [7] * 8
    assert lengths_of(Threshold(survival=0.0, confidence="head"), confidence) == [7] * 8
    assert lengths_of(Threshold(survival=1.1, confidence="head"), confidence) == [0] * 8
    assert lengths_of(NoDrafts(), confidence) == [0] * 8
    for scheduler in (
        early_stop(V4_FLASH),
        global_budget(V4_FLASH),
        Oracle(hardware=V4_FLASH),
        Threshold(survival=0.2, confidence="head"),
    ):
        assert lengths_of(scheduler, np.ones((4, 0))) == [0] * 4


def test_the_threshold_is_of_the_survival():
    assert lengths_of(
        Threshold(survival=0.5, confidence="head"), [[0.8, 0.7, 0.8], [0.4, 1.0, 1.0], [1.0, 1.0, 0.5]]
    ) == [2, 0, 3]


def test_the_oracle_verifies_nothing_in_vain():
    truth = np.array([[1, 1, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]])  # what comes after a rejection does not count
    assert lengths_of(Oracle(hardware=Curve((0, 64), (0.01, 0.011))), truth) == [2, 0, 4]
    assert lengths_of(Oracle(hardware=Curve((0, 4, 64), (0.01, 0.01, 1.0))), truth) == [1, 0, 0]
    assert Oracle(hardware=V4_FLASH).confidence == "acceptance"


def test_admission_takes_the_most_likely_tokens():
    generator = np.random.default_rng(0)
    for _ in range(200):
        survival = np.cumprod(generator.choice([0.25, 0.5, 0.9, 1.0], (6, 4)), axis=1)
        budget = int(generator.integers(0, 25))
        # By falling survival, then slot, then row: a stable sort of the slots one after the other.
        order = np.argsort(-survival.T.ravel(), kind="stable")[:budget]
        assert admit(survival, budget).tolist() == np.bincount(order % 6, minlength=6).tolist()


def test_the_convex_minorant_is_the_greatest_convex_curve_below():
    generator = np.random.default_rng(0)
    for _ in range(50):
        costs = np.cumsum(generator.random(30) ** 6)
        found = convex_minorant(costs)
        assert (found <= costs + 1e-12).all()
        assert (np.diff(found, 2) >= -1e-12).all()
        # The greatest: no point lies below every line between two points of the curve around it.
        for place in range(30):
            lines = [
                costs[left] + (costs[right] - costs[left]) * (place - left) / max(right - left, 1)
                for left in range(place + 1)
                for right in range(place, 30)
            ]
            assert found[place] == pytest.approx(min(lines))
    assert convex_minorant(np.array([2.0])).tolist() == [2.0]


def test_early_stop_collapses_on_a_staircase_and_the_guard_avoids_it():
    generator = np.random.default_rng(0)
    shares = {"measured": [], "convex": []}
    for num_requests in (16, 64, 128):
        confidence = random_confidence(generator, num_requests)
        best = max(expected(V4_FLASH, confidence, np.full(num_requests, k)) for k in range(8))
        for cost_curve, found in shares.items():
            lengths = np.array(lengths_of(early_stop(V4_FLASH, cost_curve), confidence))
            found.append(expected(V4_FLASH, confidence, lengths) / best)
    assert max(shares["measured"]) < 0.75
    assert min(shares["convex"]) > 0.95


def expected(hardware, confidence, lengths):
    """Tokens per second if the confidences are right."""
    survival = np.cumprod(confidence, axis=1)
    tokens = len(lengths) + survival[np.arange(survival.shape[1]) < lengths[:, None]].sum()
    cost = StepCosts(hardware)(Load(len(lengths)), num_draft_tokens=confidence.shape[1])
    return tokens / cost[lengths.sum()]


TOLERANCE = {"global_budget": 0.04, "early_stop": 0.04}
"""How far below the best fixed length of a load a hardware-aware scheduler may be, on any curve.

Requests here change from step to step, so that what is known of earlier steps is worth nothing: the hard case.
"""


@pytest.mark.parametrize("num_requests", [1, 4, 16, 64, 128, 256])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("mode", TOLERANCE)
def test_never_worse_than_the_best_fixed_length_of_the_load(mode, curve, num_requests):
    hardware = CURVES[curve]
    costs = StepCosts(hardware)(Load(num_requests), num_draft_tokens=7)
    scheduler = global_budget(hardware) if mode == "global_budget" else early_stop(hardware)
    generator = np.random.default_rng(num_requests)
    tokens, seconds = np.zeros(9), np.zeros(9)
    for step in range(60):
        confidence = random_confidence(generator, num_requests)
        survival = np.cumprod(confidence, axis=1)
        ours = np.array(lengths_of(scheduler, confidence))
        if step < 2:
            continue
        for column, lengths in enumerate([*(np.full(num_requests, k) for k in range(8)), ours]):
            tokens[column] += num_requests + survival[np.arange(7) < lengths[:, None]].sum()
            seconds[column] += costs[lengths.sum()]
    rates = tokens / seconds
    assert rates[8] >= rates[:8].max() * (1 - TOLERANCE[mode])


def test_the_budget_is_that_of_the_confidences_two_steps_ago():
    hardware = CURVES["compute_bound"]
    generator = np.random.default_rng(0)
    steps = [random_confidence(generator, 20) for _ in range(5)]
    costs = StepCosts(hardware)(Load(20), num_draft_tokens=7)
    scheduler = global_budget(hardware)
    for step, confidence in enumerate(steps):
        known = np.cumprod(steps[step - 2], axis=1) if step >= 2 else np.ones((20, 7))
        lengths = lengths_of(scheduler, confidence)
        assert sum(lengths) == best_budget(throughputs(known, costs))
        assert lengths == admit(np.cumprod(confidence, axis=1), sum(lengths)).tolist()


def test_requests_are_known_by_their_names():
    """Rows move, one request leaves, two come: those count as sure."""
    scheduler = global_budget(V4_FLASH, staleness=1)
    first = np.array([[0.9, 0.5], [0.3, 0.2], [0.8, 0.8]])
    scheduler.draft_lengths(first, Load(3, request_ids=np.array([7, 3, 5])), num_draft_tokens=2)
    known = scheduler._known(np.array([5, 9, 7, 1]), (4, 2))
    np.testing.assert_allclose(known, [[0.8, 0.64], [1, 1], [0.9, 0.45], [1, 1]])


def test_costs_are_remembered_by_load():
    asked = []

    class Counting(Curve):
        def verify_time_s(self, shape):
            asked.append(shape)
            return super().verify_time_s(shape)

    costs = StepCosts(Counting((0, 4096), (0.01, 0.02), draft_s=0.001))
    for context in (100_000, 100_500, 102_000):
        costs(Load(4, num_context_tokens=context), num_draft_tokens=7)
    assert len(asked) == 1
    assert asked[0].num_verify_tokens.tolist() == list(range(4, 33))
    assert 0.94 < asked[0].num_context_tokens / 100_000 <= 1
    costs(Load(4, num_context_tokens=110_000), num_draft_tokens=7)
    costs(Load(5, num_context_tokens=100_000), num_draft_tokens=7)
    costs(Load(4, num_context_tokens=100_000, num_prefill_tokens=64), num_draft_tokens=7)
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        (
            Threshold(survival=0.5, confidence="head"),
            "scheduler=threshold decides by confidences.*set scheduler.confidence=probability.*drafter.confidence=true",
        ),
        (early_stop(V4_FLASH), "scheduler=hardware_aware decides by confidences.*scheduler=fixed"),
        (Oracle(hardware=V4_FLASH), "scheduler=oracle"),
    ],
)
def test_a_drafter_without_confidences_is_refused(scheduler, says):
    with pytest.raises(ValueError, match=says):
        scheduler.draft_lengths(None, loaded(2), num_draft_tokens=3)
    assert Fixed(num_verified_tokens=2).draft_lengths(None, loaded(2), num_draft_tokens=3).tolist() == [2, 2]


def test_other_refusals():
    confidence = np.full((2, 3), 0.5)
    with pytest.raises(ValueError, match=r"num_verified_tokens=5, but the drafter drafts 3"):
        Fixed(num_verified_tokens=5).draft_lengths(confidence, loaded(2), num_draft_tokens=3)
    with pytest.raises(ValueError, match=r"give Load\.request_ids"):
        global_budget(V4_FLASH).draft_lengths(confidence, Load(2), num_draft_tokens=3)
    for seconds in (-0.01, -1.0):  # of the verify; with the draft's 10 ms together 0, or less
        with pytest.raises(ValueError, match="step times are positive"):
            lengths_of(early_stop(Curve((0, 64), (seconds, seconds), draft_s=0.01)), confidence)


@pytest.mark.parametrize(
    ("overrides", "made"),
    [
        (["scheduler=none"], NoDrafts),
        (["scheduler=fixed", "scheduler.num_verified_tokens=2"], Fixed),
        (["scheduler=threshold"], Threshold),
        (["scheduler=hardware_aware", "scheduler.mode=early_stop"], HardwareAware),
        (["scheduler=hardware_aware"], HardwareAware),
        (["scheduler=oracle"], Oracle),
    ],
)
def test_every_option_builds(overrides, made):
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", overrides)
    scheduler: VerifyScheduler = build_scheduler(config, V4_FLASH)
    assert type(scheduler) is made
    assert len(lengths_of(scheduler, np.full((2, 7), 0.8))) == 2


def test_calibrated_confidences_reach_the_scheduler(tmp_path):
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config, other = (
            compose("config", ["scheduler=threshold", "scheduler.survival=0.7", f"scheduler.confidence={source}"])
            for source in ("head", "probability")
        )
    confidence = np.array([[0.9, 0.9]])  # at temperature 2: 0.75 each
    assert lengths_of(build_scheduler(config, V4_FLASH), confidence) == [2]
    calibration = tmp_path / "calibration.json"
    calibration.write_text('{"temperatures": [2.0, 2.0], "setting": {"confidence": "head"}}')
    assert lengths_of(build_scheduler(config, V4_FLASH, calibration=calibration), confidence) == [1]
    with pytest.raises(ValueError, match=r"calibrates scheduler\.confidence=head.*do stages=calibrate again"):
        build_scheduler(other, V4_FLASH, calibration=calibration)
    truth = Calibrated(Oracle(hardware=Curve((0, 64), (0.01, 0.01))), np.full(2, 8.0))
    assert truth.confidence == "acceptance" and lengths_of(truth, [[1.0, 0.0]]) == [1]  # the truth needs no calibration


@pytest.mark.parametrize(
    "override",
    ["scheduler.staleness=0", "scheduler.mode=greedy", "scheduler.cost_curve=flat", "scheduler.confidence=entropy"],
)
def test_a_wrong_setting_is_refused_with_its_key(override):
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", [override])
    with pytest.raises(ValueError, match=override.partition("=")[0]):
        build_scheduler(config, V4_FLASH)
