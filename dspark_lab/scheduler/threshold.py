"""Verify while a request's survival is high enough, whatever the load."""

import numpy as np

from dspark_lab.hardware.protocol import Floats, Ints
from dspark_lab.records import ConfidenceSource
from dspark_lab.scheduler.budget import survivals
from dspark_lab.scheduler.protocol import Load
from dspark_lab.validation import checked


class Threshold:
    """Slots whose survival is at least ``survival``; 0 verifies all, above 1 none.

    Lossless: slot k is judged by confidences 1..k, which are made from the drafts before slot k.
    """

    @checked
    def __init__(self, *, survival: float, confidence: ConfidenceSource) -> None:
        self.survival = survival
        self.confidence: ConfidenceSource = confidence

    def draft_lengths(self, confidence: Floats | None, load: Load, *, num_draft_tokens: int) -> Ints:
        return np.add.reduce(survivals(confidence, scheduler="threshold") >= self.survival, axis=1, dtype=np.int64)
