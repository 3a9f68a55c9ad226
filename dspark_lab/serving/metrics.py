"""The metrics of serving, each defined once, over the part of a simulation that follows its warm-up.

Rates are ratios of sums over the window; their 95 % intervals come from batch means (equal parts of the window, over all
seeds), those of latencies from the seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import t as student

from dspark_lab.hardware.protocol import Floats
from dspark_lab.serving.log import Log

NUM_BATCHES = 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """``value`` None: not defined (no request was answered, nothing was drafted). ``low``, ``high``: 95 %."""

    value: float | None
    low: float | None = None
    high: float | None = None


def serving_metrics(logs: Sequence[Log], *, warmup_s: float, num_gpus: int) -> dict[str, Estimate]:
    """Metrics of equal simulations with different seeds.

    * ``tokens_per_s_per_user``: tokens after each request's first / seconds that requests spent decoding: one over the
      mean time per output token, weighted by tokens.
    * ``output_tokens_per_s``: all tokens emitted / seconds; ``_per_gpu``: / GPUs, those that prefill included;
      ``total_tokens_per_s_per_gpu``: prompt tokens prefilled added.
    * ``acceptance_length``: tokens after the first / verify steps of requests (bonus token included).
    * ``verified_tokens_per_step``: draft tokens verified / verify steps of requests; ``wasted_verification``: of them, the
      share that did not stand.
    * ``time_to_first_token_s_p50`` ...: from the client's asking; ``time_per_output_token_s_p50`` ...: per request,
      (end - first token) / (tokens - 1); ``request_time_s_p50``: from asking to the last token.
    * ``num_running``: requests that decode, averaged over time.

    Raises:
        ValueError: the warm-up leaves no window.
    """
    if any(log.duration_s <= warmup_s for log in logs):
        raise ValueError(f"warmup_s={warmup_s} leaves nothing of duration_s={logs[0].duration_s}")
    parts = [_Sums.of(log, warmup_s) for log in logs]
    sums = _Sums(*(np.concatenate([getattr(part, name) for part in parts]) for name in _Sums.__slots__))
    found = {name: _rate(*ratio(sums), scale) for name, (ratio, scale) in _rates(num_gpus).items()}
    return found | {name: _latency(logs, warmup_s, of) for name, of in _LATENCIES.items()}


@dataclass(frozen=True, slots=True)
class _Sums:
    """By batch: what was counted in each of ``NUM_BATCHES`` parts of the window."""

    seconds: Floats
    busy: Floats  # seconds times decoding requests
    rounds: Floats
    emitted: Floats
    first: Floats
    prefilled: Floats
    verified: Floats
    accepted: Floats

    @classmethod
    def of(cls, log: Log, warmup_s: float) -> "_Sums":
        edges = np.linspace(warmup_s, log.duration_s, NUM_BATCHES + 1)
        place = np.searchsorted(edges, log.end_s, side="right") - 1
        inside = (place >= 0) & (place < NUM_BATCHES)

        def total(values: ArrayLike) -> Floats:
            return np.bincount(place[inside], np.asarray(values, float)[inside], NUM_BATCHES).astype(float)

        return cls(
            seconds=np.diff(edges),
            busy=total(log.step_s * log.num_requests),
            rounds=total(log.num_requests),
            emitted=total(log.emitted),
            first=total(log.first),
            prefilled=total(log.num_prefill),
            verified=total(log.verified),
            accepted=total(log.accepted),
        )


def _rates(num_gpus: int) -> Mapping[str, tuple[Callable[[_Sums], tuple[Floats, Floats]], float]]:
    """Numerator and denominator by batch, and what their ratio is divided by."""
    return {
        "tokens_per_s_per_user": (lambda s: (s.emitted, s.busy), 1),
        "output_tokens_per_s": (lambda s: (s.emitted + s.first, s.seconds), 1),
        "output_tokens_per_s_per_gpu": (lambda s: (s.emitted + s.first, s.seconds), num_gpus),
        "total_tokens_per_s_per_gpu": (lambda s: (s.emitted + s.first + s.prefilled, s.seconds), num_gpus),
        "acceptance_length": (lambda s: (s.emitted, s.rounds), 1),
        "verified_tokens_per_step": (lambda s: (s.verified, s.rounds), 1),
        "wasted_verification": (lambda s: (s.verified - s.accepted, s.verified), 1),
        "num_running": (lambda s: (s.busy, s.seconds), 1),
    }


def _rate(top: Floats, bottom: Floats, scale: float) -> Estimate:
    if bottom.sum() == 0:
        return Estimate(None)
    value = float(top.sum() / bottom.sum() / scale)
    batches = top[bottom > 0] / bottom[bottom > 0] / scale
    return _interval(value, batches)


def _interval(value: float, samples: Floats) -> Estimate:
    if len(samples) < 2:
        return Estimate(value)
    half = float(student.ppf(0.975, len(samples) - 1) * samples.std(ddof=1) / np.sqrt(len(samples)))
    return Estimate(value, value - half, value + half)


def _first_token_s(log: Log) -> Floats:
    return log.first_s - log.asked_s


def _output_token_s(log: Log) -> Floats:
    several = log.output_tokens > 1
    seconds = (log.done_s - log.first_s) / np.maximum(log.output_tokens - 1, 1)
    return np.where(several, seconds, np.nan)


def _request_s(log: Log) -> Floats:
    return log.done_s - log.asked_s


_LATENCIES: Mapping[str, tuple[Callable[[Log], Floats], float]] = {
    "time_to_first_token_s_p50": (_first_token_s, 50),
    "time_to_first_token_s_p99": (_first_token_s, 99),
    "time_per_output_token_s_p50": (_output_token_s, 50),
    "time_per_output_token_s_p99": (_output_token_s, 99),
    "request_time_s_p50": (_request_s, 50),
}


def _latency(logs: Sequence[Log], warmup_s: float, of: tuple[Callable[[Log], Floats], float]) -> Estimate:
    """Of the requests that were answered after the warm-up."""
    seconds, percentile = of
    by_seed = [seconds(log)[log.done_s > warmup_s] for log in logs]
    by_seed = [values[~np.isnan(values)] for values in by_seed]
    if not sum(map(len, by_seed)):
        return Estimate(None)
    value = float(np.percentile(np.concatenate(by_seed), percentile))
    return _interval(value, np.array([np.percentile(values, percentile) for values in by_seed if len(values)], float))
