import math
from collections import Counter

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from dspark_lab.evaluation.calibration import (
    Rounds,
    apply_temperatures,
    calibration_error,
    fit_temperatures,
    gather_rounds,
    judge,
    read_temperatures,
    save_calibration,
    split_rounds,
)
from dspark_lab.evaluation.traces import read_traces, save_traces
from dspark_lab.records import Trace, VerifyStep

GRID = np.geomspace(0.125, 8.0, 97)


def drawn_rounds(num_rounds, *, sharpness=1.0, num_slots=3, num_prompts=50, seed=0):
    """Outcomes drawn from true conditional probabilities; the drafter claims logits ``sharpness`` times as large."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(1.0, 1.2, (num_rounds, num_slots))
    stands = generator.random(logits.shape) < 1 / (1 + np.exp(-logits))
    accepted = np.cumprod(stands, axis=1).sum(1)
    claimed = 1 / (1 + np.exp(-sharpness * logits))
    return Rounds(claimed, accepted, np.arange(num_rounds) % num_prompts)


def judged(rounds, temperatures, **options):
    return judge(
        rounds, np.array(temperatures), num_fit_rounds=[1] * rounds.confidence.shape[1], num_bins=20, seed=0, **options
    )


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 2.0])
def test_temperatures_undo_what_was_done_to_the_logits(sharpness):
    temperatures = fit_temperatures(drawn_rounds(40_000, sharpness=sharpness), grid=GRID, num_bins=20)
    assert temperatures == pytest.approx([sharpness] * 3, rel=0.15)
    for position in judged(drawn_rounds(40_000, sharpness=sharpness, seed=1), temperatures):
        assert position.after.ece < 0.015
        assert position.before.ece > 0.03 or sharpness == 1.0


def test_each_temperature_is_the_best_given_those_before_it():
    rounds = drawn_rounds(300, sharpness=1.7)
    grid = np.array([0.5, 1.0, 1.5, 2.0, 3.0])
    found = fit_temperatures(rounds, grid=grid, num_bins=10)
    survival = np.ones(300)
    for slot in range(3):
        errors = {}
        for temperature in grid:
            bins = [[] for _ in range(10)]
            for row in range(300):
                c = rounds.confidence[row, slot]
                scaled = 1 / (1 + math.exp(-math.log(c / (1 - c)) / temperature))
                bins[min(int(survival[row] * scaled * 10), 9)].append(
                    (survival[row] * scaled, rounds.accepted[row] > slot)
                )
            errors[temperature] = sum(
                abs(sum(c for c, _ in each) - sum(outcome for _, outcome in each)) / 300 for each in bins if each
            )
        assert errors[found[slot]] == pytest.approx(min(errors.values()), abs=1e-12)
        survival = survival * apply_temperatures(rounds.confidence, found)[:, slot]


def test_the_calibration_error_is_torchmetrics():
    generator = np.random.default_rng(0)
    predicted, outcomes = generator.random(500), generator.random(500) < 0.4
    theirs = binary_calibration_error(torch.from_numpy(predicted), torch.from_numpy(outcomes).long(), n_bins=15)
    assert calibration_error(predicted, outcomes, num_bins=15) == pytest.approx(float(theirs), abs=1e-6)
    assert calibration_error(np.array([0.2, 0.4, 1.0]), np.array([0, 1, 1]) > 0, num_bins=2) == pytest.approx(0.4 / 3)


def test_temperature_one_changes_nothing_and_saturation_is_finite():
    confidence = np.array([[0.0, 0.3, 1.0]])
    assert apply_temperatures(confidence, np.ones(3)) == pytest.approx(confidence, abs=1e-6)
    assert apply_temperatures(np.array([0.9]), np.array([2.0, 1.0])) == pytest.approx([0.75])  # logit ln 9 -> ln 3
    with pytest.raises(ValueError, match="confidences of 3 draft positions, but only 2 were calibrated"):
        apply_temperatures(confidence, np.ones(2))


def test_slots_that_were_not_drafted_do_not_count():
    rounds = drawn_rounds(4000, sharpness=2.0)
    narrow = rounds.confidence.copy()
    narrow[::2, 2] = np.nan
    accepted = np.where(np.isnan(narrow[:, 2]), np.minimum(rounds.accepted, 2), rounds.accepted)
    short = Rounds(narrow, accepted, rounds.prompt)
    temperatures = fit_temperatures(short, grid=GRID, num_bins=20)
    assert temperatures[:2].tolist() == fit_temperatures(rounds, grid=GRID, num_bins=20)[:2].tolist()
    assert [position.num_rounds for position in judged(short, temperatures)] == [4000, 4000, 2000]


def test_the_floor_is_what_exact_survivals_would_show():
    small = [judged(drawn_rounds(300, seed=seed, num_prompts=10), [1.0] * 3) for seed in range(40)]
    for k in range(3):
        mean = np.mean([positions[k].before.ece for positions in small])
        assert mean == pytest.approx(np.mean([positions[k].before.ece_floor for positions in small]), rel=0.1)
        assert mean > 0.02  # far from zero, although nothing is wrong


def test_the_interval_of_an_error_is_free_of_the_bias_of_noise():
    """0.75 said where 0.6 is true, in few rounds: intervals of the error hold 0.15."""
    held = []
    for seed in range(40):
        accepted = (np.random.default_rng(seed).random(400) < 0.6).astype(np.int64)
        quality = judged(Rounds(np.full((400, 1), 0.75), accepted, np.arange(400) % 20), [1.0])[0].before
        assert quality.ece_low <= quality.ece <= quality.ece_high
        held.append(quality.ece_low <= 0.15 <= quality.ece_high)
    assert np.mean(held) > 0.8


def test_brier_auroc_and_the_reliability_diagram():
    rounds = Rounds(np.array([[0.9], [0.8], [0.3], [0.1]]), np.array([1, 0, 1, 0]), np.array([0, 0, 1, 1]))
    quality = judged(rounds, [1.0])[0].before
    assert quality.brier == pytest.approx((0.01 + 0.64 + 0.49 + 0.01) / 4)
    assert quality.auroc == pytest.approx(0.75)  # of the four pairs only (0.3, 0.8) is the wrong way round
    assert [each.num_rounds for each in quality.bins] == [1, 1, 1, 1]
    assert [each.survival for each in quality.bins] == pytest.approx([0.1, 0.3, 0.8, 0.9])
    assert [each.accepted for each in quality.bins] == [0.0, 1.0, 0.0, 1.0]
    assert judged(Rounds(rounds.confidence, np.ones(4, np.int64), rounds.prompt), [1.0])[0].before.auroc is None


def trace(name, *steps):
    made = tuple(VerifyStep(9, len(confidence), accepted, confidence) for confidence, accepted in steps)
    return Trace(name, "toy", made, 9)


def test_rounds_leave_out_where_the_answer_ended():
    rounds = gather_rounds([trace("a", ((0.9, 0.8), 1), ((0.7,), 1), ((0.5, 0.5), 0)), trace("b", ((0.1, 0.1), 0))])
    np.testing.assert_equal(rounds.confidence, [[0.9, 0.8], [0.7, np.nan]])
    assert rounds.accepted.tolist() == [1, 1]
    assert rounds.prompt.tolist() == [0, 0]


def test_a_drafter_without_confidences_is_refused():
    step = VerifyStep(4, 2, 1)
    with pytest.raises(ValueError, match=r"no confidences.*drafter\.confidence=true"):
        gather_rounds([Trace("a", "toy", (step, step), 4)])


def test_parts_share_no_prompt_and_need_rounds():
    rounds = drawn_rounds(1000)
    fitted, held_out = split_rounds(rounds, fit_share=0.4, min_rounds=100, seed=3)
    assert not set(fitted.prompt) & set(held_out.prompt)
    assert (len(set(fitted.prompt)), len(set(held_out.prompt))) == (20, 30)
    assert Counter(fitted.prompt) + Counter(held_out.prompt) == Counter(rounds.prompt)
    again = split_rounds(rounds, fit_share=0.4, min_rounds=100, seed=3)[0]
    assert again.prompt.tolist() == fitted.prompt.tolist()
    with pytest.raises(ValueError, match=r"fitted part has 20 prompts .* and 400 rounds .*minimum 401.*min_rounds"):
        split_rounds(rounds, fit_share=0.4, min_rounds=401, seed=3)
    with pytest.raises(ValueError, match=r"0 prompts \(minimum 2\) and 0 rounds"):
        split_rounds(gather_rounds([trace("a", ((0.5,), 1))]), fit_share=0.5, min_rounds=1, seed=0)


def test_the_file_holds_the_temperatures(tmp_path):
    path = tmp_path / "calibration.json"
    with pytest.raises(ValueError, match="add calibrate to stages"):
        read_temperatures(path)
    save_calibration(path, judged(drawn_rounds(500), [1.5, 2.0, 0.7]), setting={"temperature": 0.0})
    assert read_temperatures(path).tolist() == [1.5, 2.0, 0.7]


def test_traces_survive_the_disk(tmp_path):
    path = tmp_path / "traces.jsonl"
    with pytest.raises(ValueError, match="add evaluate to stages"):
        read_traces(path, origin="measured")
    mine = [trace("a", ((0.9, 0.8), 1)), Trace("b", "toy", (VerifyStep(4, 2, 1),), 4)]
    save_traces(path, {"replayed": mine, "measured": mine[:1]})
    assert read_traces(path, origin="replayed") == mine
    assert read_traces(path, origin="measured") == mine[:1]
    save_traces(path, {"replayed": mine})
    with pytest.raises(ValueError, match=r"no measured traces.*evaluate\.mode=decode"):
        read_traces(path, origin="measured")
