"""Rounds recorded and rounds drawn: the published length comes back, narrow recordings are refused."""

import numpy as np
import pytest
from engines import accepting

from dspark_lab.records import Trace, VerifyStep
from dspark_lab.serving.acceptance import from_traces, solve_bernoulli, solve_beta, synthesize

PUBLISHED = {"macro": 4.11, "math": 6.42, "humaneval": 4.96, "translation": 4.65}


def trace(*rounds: tuple[int, int], prompt: str = "a", confidence: bool = True) -> Trace:
    steps = tuple(
        VerifyStep(position, width, accepted, tuple(0.9 - 0.1 * k for k in range(width)) if confidence else None)
        for position, (width, accepted) in enumerate(rounds)
    )
    return Trace(prompt, "sums", steps, 1 + sum(accepted + 1 for _, accepted in rounds))


@pytest.mark.parametrize("length", PUBLISHED.values(), ids=PUBLISHED.keys())
@pytest.mark.parametrize("concentration", [None, 8.0])
def test_a_published_length_comes_back_within_one_percent(length: float, concentration: float | None) -> None:
    table = accepting(length, width=8, concentration=concentration, num_requests=400)
    assert table.acceptance_length == pytest.approx(length, rel=0.01)


def test_the_solved_chances_by_hand() -> None:
    assert solve_bernoulli(1.75, 2) == pytest.approx(0.5)
    assert solve_beta(1.75, 2, 1e9) == pytest.approx(0.5, rel=1e-6)
    # Beta(1, 1): 1 + 1/2 + 1/3.
    assert solve_beta(1 + 1 / 2 + 1 / 3, 2, 2.0) == pytest.approx(0.5)


@pytest.mark.parametrize("length", [0.5, 1.0, 9.0])
def test_an_impossible_length_is_refused(length: float) -> None:
    with pytest.raises(ValueError, match=r"it lies between 1 and 9"):
        solve_bernoulli(length, 8)


def test_confidences_are_calibrated_until_they_are_shifted() -> None:
    honest = accepting(4.0, concentration=4.0, num_requests=300)
    assert honest.confidence is not None
    assert honest.confidence[:, 0].mean() == pytest.approx((honest.accepted > 0).mean(), abs=0.01)
    boastful = accepting(4.0, concentration=4.0, num_requests=300, confidence_shift=1.0)
    noisy = accepting(4.0, concentration=4.0, num_requests=300, confidence_noise=1.0)
    assert boastful.confidence is not None and noisy.confidence is not None
    assert (boastful.confidence > honest.confidence).all()
    assert np.corrcoef(noisy.confidence[:, 0], honest.confidence[:, 0])[0, 1] < 0.95


def test_recorded_rounds_stay_with_their_request() -> None:
    table = from_traces(
        [trace((3, 2), (3, 0)), trace(), trace((3, 3), prompt="b")], name="t", origin="measured", num_draft_tokens=None
    )
    assert (table.width, table.accepted.tolist(), table.starts.tolist(), table.lengths.tolist()) == (
        3, [2, 0, 3], [0, 2], [2, 1],
    )  # fmt: skip
    assert table.confidence is not None
    assert table.confidence.shape == (3, 3)
    assert (
        from_traces([trace((3, 1), confidence=False)], name="t", origin="measured", num_draft_tokens=3).confidence
        is None
    )


def test_fewer_drafts_accept_the_smaller_number() -> None:
    wide = from_traces([trace((3, 2), (3, 3), (3, 0))], name="t", origin="measured", num_draft_tokens=None)
    for table in (
        wide.narrowed(2),
        from_traces([trace((3, 2), (3, 3), (3, 0))], name="t", origin="measured", num_draft_tokens=2),
    ):
        assert table.accepted.tolist() == [2, 2, 0]
        assert table.confidence is not None
        assert table.confidence.shape == (3, 2)


def test_rounds_recorded_at_less_than_the_width_asked_are_refused() -> None:
    narrow = [trace((2, 2), (2, 1), (2, 2), (2, 0))]
    with pytest.raises(ValueError, match=r"num_draft_tokens=4, but 2 of 4 rounds of t .*evaluate\.num_draft_tokens=4"):
        from_traces(narrow, name="t", origin="measured", num_draft_tokens=4)
    with pytest.raises(ValueError, match="recorded with 2 drafts verified"):
        from_traces(narrow, name="t", origin="measured", num_draft_tokens=2).narrowed(3)
    # A thresholded drafter: its short rounds that ended in a rejection tell all.
    mixed = [trace((4, 2), (2, 1), (4, 4))]
    assert from_traces(mixed, name="t", origin="measured", num_draft_tokens=4).accepted.tolist() == [2, 1, 4]


def test_without_rounds_there_is_nothing_to_replay() -> None:
    with pytest.raises(ValueError, match="hold no verify step"):
        from_traces([trace()], name="t", origin="measured", num_draft_tokens=None)


def test_domains_share_a_table() -> None:
    table = synthesize(
        {"easy": 6.0, "hard": 2.0},
        name="t",
        num_draft_tokens=7,
        concentration=None,
        confidence_noise=0.0,
        confidence_shift=0.0,
        num_requests=40,
        seed=0,
    )
    assert len(table.starts) == 80
    half = len(table.accepted) // 2
    assert 1 + table.accepted[:half].mean() == pytest.approx(6.0, rel=0.02)
    assert 1 + table.accepted[half:].mean() == pytest.approx(2.0, rel=0.02)
