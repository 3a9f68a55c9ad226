"""The serve gate's judgement."""

import pytest

from dspark_lab.evaluation.bootstrap import bootstrap_difference, bootstrap_ratios
from dspark_lab.evaluation.gate import CAUSES, Pattern, compare, find_pattern, likely_causes, mismatches
from dspark_lab.records import Trace, VerifyStep


def traces(*accepted: list[int]) -> list[Trace]:
    """One prompt a list: what each verify step of three draft tokens accepted."""
    return [
        Trace(str(index), "sums", tuple(VerifyStep(0, 3, a) for a in steps), 1 + len(steps) + sum(steps))
        for index, steps in enumerate(accepted)
    ]


def test_equal_traces_agree_exactly() -> None:
    ours = traces([0, 1, 3], [2, 2])
    found = compare(ours, ours, seed=0)
    assert found.agrees and found.causes == ()
    assert (found.ours, found.served) == (2.6, 2.6)
    assert (found.difference, found.low, found.high) == (0.0, 0.0, 0.0)


def test_noise_of_both_signs_agrees_and_a_steady_loss_does_not() -> None:
    ours = traces(*[[1, 2, 0, 1]] * 12)
    noisy = traces(*[[1, 2, 0, 2], [1, 2, 0, 0]] * 6)
    worse = traces(*[[1, 1, 0, 1], [0, 1, 0, 1]] * 6)
    assert compare(ours, noisy, seed=0).agrees
    found = compare(ours, worse, seed=0, faults=["a known fault"])
    assert not found.agrees and found.causes[1] == "a known fault"
    assert found.high < 0 and found.difference == pytest.approx(found.served - found.ours)
    assert "acceptance length 1.625 served, 2.000 here, difference -0.375 [" in str(found)


def test_a_steady_difference_below_one_percent_is_agreement() -> None:
    ours = traces(*[[1] * 200] * 4)
    served = traces(*[[1] * 199 + [0]] * 4)  # 1.995 of 2.0
    found = compare(ours, served, seed=0)
    assert found.high < 0 and found.agrees


def test_nothing_drafted_is_nothing_compared() -> None:
    with pytest.raises(ValueError, match="nothing was drafted"):
        compare(traces([], []), traces([], []), seed=0)


@pytest.mark.parametrize(
    ("served", "pattern"),
    [
        ([0.01, 0.0, 0.0], "zero"),
        ([0.4, 0.28, 0.2], "first"),  # 0.7 given the prefix throughout, as ours: the first token alone is worse
        ([0.6, 0.2, 0.1], "cliff"),
        ([0.6, 0.42, 0.1], "tail"),
        ([0.7, 0.5, 0.3], "higher"),
    ],
)
def test_patterns(served: list[float], pattern: Pattern) -> None:
    ours = [0.6, 0.42, 0.29]
    assert find_pattern(ours, served) == pattern
    told, causes = CAUSES[pattern]
    assert likely_causes(ours, served, ["a known fault"]) == (told, "a known fault", *causes)


def test_another_number_of_draft_tokens_goes_before_any_pattern() -> None:
    (told,) = likely_causes([0.6, 0.4, 0.3], [0.6, 0.4])
    assert "drafts 2 tokens, 3 were drafted here" in told


def test_one_draft_token_has_no_second() -> None:
    assert find_pattern([0.6], [0.57]) == "tail"


def test_mismatches() -> None:
    assert mismatches([(1, 2), (3,), (4, 5)], [[1, 2], [3, 3], [4]]) == [1, 2]


def test_the_difference_of_paired_prompts_is_surer_than_that_of_two_samples() -> None:
    top = [[n + 0.1, float(n)] for n in range(10)]
    bottom = [[1.0, 1.0]] * 10
    value, low, high = bootstrap_difference(top, bottom, seed=3)
    assert value == pytest.approx(0.1) and low == pytest.approx(0.1) and high == pytest.approx(0.1)
    alone = bootstrap_ratios(top, bottom, seed=3)
    assert alone.high[0] - alone.low[0] > 1.0
