"""Schedulers that ask nothing: no draft tokens, or as many for every request in every step."""

import numpy as np
from pydantic import NonNegativeInt

from dspark_lab.hardware.protocol import Floats, Ints
from dspark_lab.scheduler.protocol import Load
from dspark_lab.validation import checked


class NoDrafts:
    """Nothing is verified: plain decoding, whatever was drafted. Lossless: every token is the target's own draw."""

    confidence = None

    def draft_lengths(self, confidence: Floats | None, load: Load, *, num_draft_tokens: int) -> Ints:
        return np.zeros(load.num_requests, np.int64)


class Fixed:
    """The first ``num_verified_tokens`` drafts of each request. Lossless: the length is known before anything is drafted."""

    confidence = None

    @checked
    def __init__(self, *, num_verified_tokens: NonNegativeInt) -> None:
        self.num_verified_tokens = num_verified_tokens

    def draft_lengths(self, confidence: Floats | None, load: Load, *, num_draft_tokens: int) -> Ints:
        """Raises ValueError when fewer are drafted."""
        if self.num_verified_tokens > num_draft_tokens:
            raise ValueError(
                f"scheduler.num_verified_tokens={self.num_verified_tokens}, but the drafter drafts {num_draft_tokens}: "
                "set at most so many, or train with larger blocks"
            )
        return np.full(load.num_requests, self.num_verified_tokens, np.int64)
