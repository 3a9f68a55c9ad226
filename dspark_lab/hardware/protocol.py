"""What a step of an inference engine costs on some hardware: two functions of what the step holds."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepShape:
    """One engine iteration of one replica (its target forward), whatever the request each token belongs to.

    ``num_verify_tokens`` = sum over decoding requests of 1 + drafted tokens verified; equal to ``num_requests`` without
    speculation. An array asks for several steps at once that differ in it alone.
    """

    num_requests: int
    num_verify_tokens: int | Ints
    num_prefill_tokens: int = 0
    num_context_tokens: int = 0  # sum of the decoding requests' lengths


@runtime_checkable  # so that a scheduler's checked constructor can tell one
class HardwareProfile(Protocol):
    """Step times in seconds, growing (weakly) with every number in a step's shape."""

    def verify_time_s(self, shape: StepShape) -> Floats:
        """The target's forward; of ``num_verify_tokens``' shape (an array of no dimension for a number)."""
        ...

    def draft_time_s(self, *, num_requests: int, num_context_tokens: int = 0) -> float:
        """The drafter's part of the step for all its tokens."""
        ...
