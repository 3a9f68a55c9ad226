"""Verify as many tokens of the batch as the hardware's cost curve makes worth while, the most likely first.

Cheng et al. 2026, arXiv 2607.05147, section 3.3 (early stop), section 5.2 (as deployed: global budget), appendix A.
"""

from collections import deque
from typing import Literal

import numpy as np
from pydantic import PositiveInt

from dspark_lab.hardware.protocol import Floats, HardwareProfile, Ints
from dspark_lab.records import ConfidenceSource
from dspark_lab.scheduler.budget import StepCosts, admit, best_budget, first_peak, survivals, throughputs
from dspark_lab.scheduler.protocol import Load
from dspark_lab.validation import checked


class HardwareAware:
    """Two ways to a budget B of draft tokens; the B largest survivals are then verified.

    *early_stop*: tokens are admitted by falling survival until the expected throughput first does not rise. Lossless by
    its break: whether a token is admitted depends on survivals no smaller than its own, so on no later confidence of its
    request, which would know the token. On a staircase of costs the first step up stops it; ``cost_curve`` *convex* lays
    the greatest convex curve under the costs, over which the throughput has one peak, and *measured* takes them as they
    are.

    *global_budget*: B is where the expected throughput is highest of all, with the survivals of ``staleness`` steps ago
    (1 for requests that had none). Lossless because what was drafted then has been verified since: B knows nothing of the
    tokens it is spent on. Which tokens get it is again decided by survivals no smaller than their own. With current
    survivals it would not be lossless, so ``staleness`` is at least 1.

    One object serves one sequence of steps: it remembers the last ``staleness`` of them.
    """

    @checked
    def __init__(
        self,
        *,
        hardware: HardwareProfile,
        mode: Literal["early_stop", "global_budget"],
        staleness: PositiveInt,
        cost_curve: Literal["convex", "measured"],
        confidence: ConfidenceSource,
    ) -> None:
        self.confidence: ConfidenceSource = confidence
        self.mode = mode
        self.costs = StepCosts(hardware, convex=mode == "early_stop" and cost_curve == "convex")
        self.past: deque[tuple[Ints, Floats]] = deque(maxlen=staleness)

    def draft_lengths(self, confidence: Floats | None, load: Load, *, num_draft_tokens: int) -> Ints:
        """Raises ValueError for a drafter without confidences, and in *global_budget* for requests without names."""
        survival = survivals(confidence, scheduler="hardware_aware")
        assert survival.shape == (load.num_requests, num_draft_tokens), (survival.shape, load, num_draft_tokens)
        costs = self.costs(load, num_draft_tokens=num_draft_tokens)
        if self.mode == "early_stop":
            return admit(survival, first_peak(throughputs(survival, costs)))
        if load.request_ids is None:
            raise ValueError(
                "scheduler.mode=global_budget remembers requests: give Load.request_ids, or use early_stop"
            )
        known = self._known(load.request_ids, survival.shape)
        self.past.append((load.request_ids.copy(), survival))
        return admit(survival, best_budget(throughputs(known, costs)))

    def _known(self, request_ids: Ints, shape: tuple[int, ...]) -> Floats:
        """Survivals of these requests ``staleness`` steps ago, [R, K]; 1 where there are none."""
        if len(self.past) < (self.past.maxlen or 0):
            return np.ones(shape)
        past_ids, past = self.past[0]
        if np.array_equal(past_ids, request_ids):
            return past
        order = past_ids.argsort()
        place = order.take(np.searchsorted(past_ids, request_ids, sorter=order), mode="clip")
        known = past.take(place, axis=0)
        known[past_ids.take(place) != request_ids] = 1.0
        return known
