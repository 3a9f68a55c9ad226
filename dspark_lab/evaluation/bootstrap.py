"""Percentile bootstrap of ratio estimators over prompts.

Steps of one answer depend on each other, so whole prompts are resampled, never steps (Efron and Tibshirani 1993, "An
Introduction to the Bootstrap", chapters 8 and 13).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

_CHUNK = 256  # resamples held at once: [_CHUNK, P] weights


@dataclass(frozen=True, slots=True)
class Ratios:
    """M ratios with intervals, each [M]; NaN where a ratio, or its interval, is not defined."""

    value: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def bootstrap_ratios(
    numerators: ArrayLike,
    denominators: ArrayLike,
    *,
    num_resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Ratios:
    """sum(numerators) / sum(denominators) over prompts, with percentile intervals.

    All M ratios share the resamples, and the same seed gives the same intervals. A ratio has no interval when fewer
    than two prompts contribute to its denominator. Resamples in which its denominator vanishes are left out.

    Args:
        numerators: [P, M], one row a prompt.
        denominators: [P, M], not negative.
    """
    top, bottom = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if top.ndim != 2 or top.shape != bottom.shape:
        raise ValueError(f"numerators {top.shape} and denominators {bottom.shape} must both be [prompts, ratios]")
    num_prompts = top.shape[0]
    value = _divide(top.sum(0), bottom.sum(0))
    low, high = np.full_like(value, np.nan), np.full_like(value, np.nan)
    known = (bottom > 0).sum(0) >= 2
    if known.any():
        drawn = [
            _divide(weights @ top[:, known], weights @ bottom[:, known])
            for weights in _resamples(num_prompts, num_resamples, seed)
        ]
        low[known], high[known] = _interval(np.concatenate(drawn), level)
    return Ratios(value, low, high)


def bootstrap_difference(
    numerators: ArrayLike, denominators: ArrayLike, *, num_resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """(value, low, high) of the first ratio minus the second over the same prompts: both from the same resamples.

    Prompts that are easy for one are easy for the other, so this interval is narrower than that of two samples.

    Args:
        numerators: [P, 2], one row a prompt.
        denominators: [P, 2], not negative; neither column is all zero.
    """
    top, bottom = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    first, second = _divide(top.sum(0), bottom.sum(0))
    drawn = [_divide(weights @ top, weights @ bottom) for weights in _resamples(len(top), num_resamples, seed)]
    low, high = _interval(-np.diff(np.concatenate(drawn), axis=1)[:, 0], level)
    return float(first - second), float(low), float(high)


def bootstrap_sums(
    sums: ArrayLike,
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    num_resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, float]:
    """(value, low, high) of a statistic of sums over prompts, by the basic bootstrap: 2 value - the quantiles.

    Resampling adds to the bias that noise gives a sum of absolute values; mirrored, the interval is free of it, where
    percentiles would have it twice (Davison and Hinkley 1997, "Bootstrap Methods and their Application", section 5.2).

    Args:
        sums: [P, M], one row a prompt.
        statistic: [N, M] summed over the prompts of N resamples -> [N].
    """
    rows = np.asarray(sums, np.float64)
    drawn = [statistic(weights @ rows) for weights in _resamples(len(rows), num_resamples, seed)]
    low, high = _interval(np.concatenate(drawn), level)
    value = float(statistic(rows.sum(0)[None])[0])
    return value, float(2 * value - high), float(2 * value - low)


def _resamples(num_prompts: int, num_resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """How often each prompt is in each resample, [at most _CHUNK, P] at a time."""
    generator = np.random.default_rng(seed)
    even = np.full(num_prompts, 1 / num_prompts)
    for start in range(0, num_resamples, _CHUNK):
        yield generator.multinomial(num_prompts, even, size=min(_CHUNK, num_resamples - start))


def _interval(drawn: NDArray[np.float64], level: float) -> NDArray[np.float64]:
    tail = (1 - level) / 2
    return np.nanquantile(drawn, [tail, 1 - tail], axis=0)


def _divide(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)
