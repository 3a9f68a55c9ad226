"""Gains over fixed lengths by hand."""

import pytest

from dspark_lab.serving.lengths import against_lengths

LENGTHS = {0: {(1, 8): 10.0, (64, 8): 90.0}, 2: {(1, 8): 20.0, (64, 8): 80.0}, 7: {(1, 8): 30.0, (64, 8): 20.0}}


def test_over_the_best_of_each_load_and_over_one_for_all() -> None:
    first, last = against_lengths("ours", {(1, 8): 33.0, (64, 8): 108.0}, LENGTHS)
    assert (first.best_length, last.best_length) == (7, 0)
    assert (first.over_best, last.over_best) == (pytest.approx(1.1), pytest.approx(1.2))
    assert first.one_length == last.one_length == 2  # 20 x 80 is more than 10 x 90 and 30 x 20
    assert (first.over_one, last.over_one) == (pytest.approx(1.65), pytest.approx(1.35))


def test_a_length_that_lacks_a_place_is_left_out() -> None:
    assert against_lengths("ours", {(1, 8): 33.0}, {**LENGTHS, 9: {(2, 8): 1e9}})[0].best_length == 7
    assert against_lengths("ours", {(4, 8): 33.0}, LENGTHS) == against_lengths("ours", {}, LENGTHS) == ()
