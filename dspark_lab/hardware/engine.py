"""Timing the steps of a running vLLM by the tokens that it streams: one piece a step for every request of a batch."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from dspark_lab.hardware.measure import Grid
from dspark_lab.hardware.protocol import StepShape
from dspark_lab.hardware.table import Measurement, TableProfile, TimedDraft, TimedStep

REQUEST_TIMEOUT_S = 600.0


class StreamingServer(Protocol):
    """What is needed of ``cluster.vllm.VllmApi``."""

    url: str
    model: str

    def stream(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Iterator[bytes]: ...


def measure_engine_steps(
    server: StreamingServer, grid: Grid, *, num_draft_tokens: int, vocab_size: int, seed: int
) -> Iterator[TimedStep]:
    """Median seconds between the tokens of requests that decode together, and how well so many steps tell it.

    A server that drafts ``num_draft_tokens`` verifies them all, so its steps have 1 + so many tokens a request, and hold
    the draft. Of one that drafts none the grid's prefills are timed too: the time to the first token, without what a prompt
    of one token takes beyond a step. Prompts are random; nobody else may use the server.

    Raises:
        ValueError: the server refused a request, or never had all requests of a step at once.
    """
    generator = np.random.default_rng(seed)

    def prompt(length: int) -> list[int]:
        return generator.integers(vocab_size, size=length).tolist()

    width = 1 + num_draft_tokens
    num_tokens = width * (grid.warmups + grid.repeats + 2)  # so many steps, were every draft accepted
    for context in grid.num_context_tokens:
        for number in grid.num_requests:
            prompts = [prompt(context) for _ in range(number)]
            with ThreadPoolExecutor(number) as pool:
                arrivals = list(pool.map(lambda ids: _arrivals(server, ids, num_tokens)[1:], prompts))
            gaps = steps_together(arrivals, warmups=grid.warmups)
            if not len(gaps):
                raise ValueError(
                    f"profile.num_requests: {number} requests never decoded together at {server.url}: start it with a "
                    "larger --max-num-seqs, or ask for fewer"
                )
            yield _timed(
                gaps, num_requests=number, num_tokens=number * width, context=number * (context + num_tokens // 2)
            )
    if num_draft_tokens or not grid.num_prefill_tokens:
        return

    def first_token_s(length: int) -> np.ndarray:
        found = [_arrivals(server, prompt(length), 1) for _ in range(grid.warmups + grid.repeats)]
        return np.array([times[1] - times[0] for times in found[grid.warmups :]])

    one = _arrivals(server, prompt(1), num_tokens)
    beyond = np.median(first_token_s(1)) - np.median(np.diff(one[1:]))
    for length in grid.num_prefill_tokens:
        yield _timed(first_token_s(length) - max(beyond, 0.0), num_requests=1, num_tokens=length, context=0)


def steps_together(arrivals: Sequence[Sequence[float]], *, warmups: int) -> np.ndarray:
    """Seconds between tokens while all requests decode: after the last one's first, before the first one's last."""
    start, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    found = []
    for times in arrivals:
        inside = np.array([at for at in times if start <= at <= end])
        found.append(np.diff(inside)[warmups:])
    return np.concatenate(found)


def separate_drafts(plain: Sequence[TimedStep], drafted: Sequence[TimedStep]) -> tuple[tuple[TimedDraft, ...], int]:
    """What ``drafted`` steps take beyond the verify times that ``plain`` ones tell, by number of requests.

    Also how many numbers of requests are left out because nothing remained for their draft.

    Raises:
        ValueError: no plain step, or none near the drafted ones' tokens.
    """
    if not plain:
        raise ValueError(
            "profile.endpoints: all of them draft, so what a step takes cannot be told from its draft: name one without a "
            "drafter too"
        )
    verify = TableProfile.fit(
        Measurement(name="the server without a drafter", target="", num_gpus=1, steps=tuple(plain))
    )
    beyond: dict[int, list[float]] = {}
    for step in drafted:
        shape = StepShape(step.num_requests, step.num_tokens, 0, step.num_context_tokens)
        beyond.setdefault(step.num_requests, []).append(step.time_s - float(verify.verify_time_s(shape)))
    drafts = [
        TimedDraft(num_requests=number, time_s=float(np.median(found)), repeats=len(found))
        for number, found in sorted(beyond.items())
        if np.median(found) > 0
    ]
    return tuple(drafts), len(beyond) - len(drafts)


def _arrivals(server: StreamingServer, prompt: Sequence[int], num_tokens: int) -> list[float]:
    """When the request was sent, and when each piece of its answer came."""
    body = {
        "model": server.model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    sent = time.perf_counter()
    pieces = [
        (time.perf_counter(), line) for line in server.stream("/v1/completions", body, timeout_s=REQUEST_TIMEOUT_S)
    ]
    arrived = [at for at, line in pieces if any(choice.get("token_ids") for choice in _choices(line))]
    if not arrived:
        raise ValueError(f"{server.url} streamed no token: {pieces[-1][1][:300] if pieces else 'nothing came'}")
    return [sent, *arrived]


def _choices(line: bytes) -> Sequence[Mapping[str, Any]]:
    return json.loads(line).get("choices") or ()


def _timed(seconds: np.ndarray, *, num_requests: int, num_tokens: int, context: int) -> TimedStep:
    low, median, high = np.percentile(seconds, [25, 50, 75])
    repeats = len(seconds) // num_requests or 1
    # How well the median is known: a client's jitter is in every gap, and averages out over the steps.
    spread = float(high - low) / repeats**0.5
    return TimedStep(
        num_requests=num_requests,
        num_tokens=num_tokens,
        num_context_tokens=context,
        time_s=float(median),
        iqr_s=spread,
        repeats=repeats,
    )
