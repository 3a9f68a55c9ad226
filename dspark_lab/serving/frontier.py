"""Frontiers: how much throughput is left at each interactivity, and what one way of serving gains over another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load: tokens/s that a user sees, output tokens/s of a GPU."""

    interactivity: float
    throughput: float
    load: float = 0.0
    num_gpus: int = 1

    @classmethod
    def of(cls, metrics: Mapping[str, float | None], *, load: float, num_gpus: int) -> "Point | None":
        """From ``serving_metrics``' values; None where one of the two is not known."""
        user, output = (metrics[name] for name in ("tokens_per_s_per_user", "output_tokens_per_s_per_gpu"))
        if user is None or output is None:
            return None
        return cls(interactivity=user, throughput=output, load=load, num_gpus=num_gpus)


def pareto(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in one number without losing in the other, by rising interactivity."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (-point.interactivity, -point.throughput)):
        if not best or point.throughput > best[-1].throughput:
            best.append(point)
    return best[::-1]


def throughput_at(points: Sequence[Point], interactivity: float) -> float | None:
    """On the frontier of ``points``, linear between neighbours; None beyond its ends."""
    frontier = pareto(points)
    x = [point.interactivity for point in frontier]
    if not x or not x[0] <= interactivity <= x[-1]:
        return None
    return float(np.interp(interactivity, x, [point.throughput for point in frontier]))


@dataclass(frozen=True, slots=True)
class Gain:
    """``ratio`` of two frontiers' throughputs at one interactivity."""

    interactivity: float
    ratio: float


def gains(points: Sequence[Point], over: Sequence[Point]) -> list[Gain]:
    """At the interactivity of each point of the other's frontier that ``points`` reach as well, slowest first.

    Towards the other's fastest point its throughput falls to that of a single user: ratios there say more about its end
    than about ours.
    """
    found = [(other, throughput_at(points, other.interactivity)) for other in pareto(over)]
    return [Gain(other.interactivity, ours / other.throughput) for other, ours in found if ours is not None]
