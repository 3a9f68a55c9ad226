"""The best fixed length of each load: what an engine that knows neither our confidences nor our step times can be told."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from dspark_lab.hardware.protocol import Floats, HardwareProfile, StepShape


def best_lengths(
    acceptance_rates: Floats, hardware: HardwareProfile, *, max_requests: int, context_tokens: int
) -> list[int]:
    """Draft tokens per request with the most expected tokens per second, of 1, 2 ... ``max_requests`` requests.

    ``acceptance_rates`` [K] are unconditional, so with n drafts a step of R requests gives R (1 + their first n) tokens and
    takes draft + verify(R (1 + n)); with none nothing is drafted. Of equal lengths the shorter one.

    Args:
        context_tokens: Of each request.
    """
    num_drafts = np.arange(len(acceptance_rates) + 1)
    tokens = np.concatenate([[1.0], 1.0 + np.cumsum(acceptance_rates)])
    found = []
    for requests in range(1, max_requests + 1):
        context = requests * context_tokens
        verify_s = hardware.verify_time_s(StepShape(requests, requests * (1 + num_drafts), 0, context))
        draft_s = hardware.draft_time_s(num_requests=requests, num_context_tokens=context)
        found.append(int(np.argmax(tokens / (verify_s + draft_s * (num_drafts > 0)))))
    return found


def ranges_of(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first, last, length) of each run of equal entries; numbers of requests count from 1."""
    found, first = [], 1
    for length, run in groupby(lengths):
        last = first + len(list(run)) - 1
        found.append((first, last, length))
        first = last + 1
    return found
