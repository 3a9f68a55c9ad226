"""Frontiers by hand."""

import pytest

from dspark_lab.serving.frontier import Point, gains, pareto, throughput_at


def points(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(interactivity=x, throughput=y) for x, y in pairs]


def test_what_is_beaten_is_not_on_the_frontier() -> None:
    found = pareto(points((10, 100), (20, 90), (15, 80), (30, 20), (30, 10), (5, 100)))
    assert [(point.interactivity, point.throughput) for point in found] == [(10, 100), (20, 90), (30, 20)]


def test_between_points_it_is_straight_and_beyond_them_unknown() -> None:
    known = points((10, 100), (20, 80), (40, 20))
    assert throughput_at(known, 15) == 90
    assert throughput_at(known, 30) == 50
    assert throughput_at(known, 9) is None
    assert throughput_at(known, 41) is None
    assert throughput_at([], 1) is None


def test_gain_is_taken_at_matched_interactivity() -> None:
    ours, theirs = points((10, 200), (40, 100)), points((5, 100), (20, 50), (25, 10), (50, 1))
    assert [(gain.interactivity, gain.ratio) for gain in gains(ours, theirs)] == [
        (20, pytest.approx((200 - 100 * 10 / 30) / 50)),
        (25, pytest.approx(150 / 10)),
    ]
    assert gains(points((60, 1), (70, 0.5)), theirs) == []
