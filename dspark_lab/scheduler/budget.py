"""How many draft tokens of a whole batch to verify, and which: the mathematics of every scheduler that looks at survivals.

Survival a[r, j] is the probability that the first j drafts of request r are accepted. With the B most likely tokens of R
requests verified, a step is expected to yield R + sum of their survivals tokens and takes draft + verify(R + B) seconds
(Cheng et al. 2026, arXiv 2607.05147, section 3.3). Survivals fall within a request, so the most likely tokens are prefixes.
"""

import numpy as np

from dspark_lab.hardware.protocol import Floats, HardwareProfile, Ints, StepShape
from dspark_lab.scheduler.protocol import Load

REMEMBERED_LOADS = 1024


def survivals(confidence: Floats | None, *, scheduler: str) -> Floats:
    """Running products [R, K] of conditional confidences [R, K].

    Raises:
        ValueError: the drafter has no confidences.
    """
    if confidence is None:
        raise ValueError(
            f"scheduler={scheduler} decides by confidences, and there are none of its kind: for a drafter without a "
            "confidence head set scheduler.confidence=probability, which takes the largest probability of each slot's "
            "distribution for it (calibrate it: stages=calibrate); or train with drafter=dspark drafter.confidence=true, or "
            "choose scheduler=fixed"
        )
    return np.multiply.accumulate(confidence, axis=1)


def throughputs(survival: Floats, costs: Floats) -> Floats:
    """Expected tokens per second with the 0, 1, 2 ... most likely of the tokens [R, K] verified: [R * K + 1].

    ``costs`` [R * K + 1]: seconds of the step with so many.
    """
    tokens = np.empty_like(costs)
    tokens[0] = len(survival)
    tokens[1:] = np.sort(survival, axis=None)[::-1]
    return np.add.accumulate(tokens) / costs


def best_budget(throughput: Floats) -> int:
    """Where the throughput is highest; of equal places the smallest."""
    return int(throughput.argmax())


def first_peak(throughput: Floats) -> int:
    """Where the throughput first does not rise any more: algorithm 1 of the paper, with its break."""
    rises = throughput[1:] > throughput[:-1]
    return len(rises) if rises.all() else int(rises.argmin())


def admit(survival: Floats, budget: int) -> Ints:
    """Lengths [R] that take the ``budget`` largest survivals of [R, K]; of equal ones the lower slot, then the lower row."""
    num_requests = len(survival)
    if not 0 < budget < survival.size:
        return np.full(num_requests, 0 if budget <= 0 else survival.shape[1], np.int64)
    rank = survival.size - budget
    smallest = np.partition(survival, rank, axis=None)[rank]
    lengths = np.add.reduce(survival >= smallest, axis=1, dtype=np.int64)
    excess = int(lengths.sum()) - budget
    if excess:  # several are equal to the smallest: the last of them are too many
        tied = np.flatnonzero((survival == smallest).T)[-excess:]
        lengths -= np.bincount(tied % num_requests, minlength=num_requests)
    return lengths


def convex_minorant(costs: Floats) -> Floats:
    """The greatest convex curve below ``costs`` [N]: straight lines between the corners of its lower hull."""
    corners: list[int] = []
    for place, cost in enumerate(costs.tolist()):
        while len(corners) > 1:
            first, last = corners[-2:]
            if (costs[last] - costs[first]) * (place - first) < (cost - costs[first]) * (last - first):
                break
            corners.pop()
        corners.append(place)
    return np.interp(np.arange(len(costs)), corners, costs[corners])


class StepCosts:
    """Seconds of draft and verify for 0, 1, 2 ... draft tokens in the step, remembered by load.

    Prefill and context are taken to 5 significant bits (within 6 %), so that a growing context meets what is remembered.
    """

    def __init__(self, hardware: HardwareProfile, *, convex: bool = False) -> None:
        self.hardware, self.convex = hardware, convex
        self.known: dict[tuple[int, ...], Floats] = {}

    def __call__(self, load: Load, *, num_draft_tokens: int) -> Floats:
        """[R * K + 1].

        Raises:
            ValueError: the profile gives a step time that is not positive.
        """
        key = (
            load.num_requests,
            num_draft_tokens,
            _rounded(load.num_prefill_tokens),
            _rounded(load.num_context_tokens),
        )
        if key not in self.known:
            if len(self.known) == REMEMBERED_LOADS:
                self.known.clear()
            self.known[key] = self._measure(*key)
        return self.known[key]

    def _measure(self, num_requests: int, num_draft_tokens: int, prefill: int, context: int) -> Floats:
        tokens = num_requests + np.arange(num_requests * num_draft_tokens + 1)
        verify_s = self.hardware.verify_time_s(StepShape(num_requests, tokens, prefill, context))
        costs = verify_s + self.hardware.draft_time_s(num_requests=num_requests, num_context_tokens=context)
        if not (costs > 0).all():
            raise ValueError(
                f"hardware gives a step of {num_requests} requests {costs.min()} seconds: step times are positive"
            )
        return convex_minorant(costs) if self.convex else costs


def _rounded(number: int) -> int:
    low = max(int(number).bit_length() - 5, 0)
    return int(number) >> low << low
