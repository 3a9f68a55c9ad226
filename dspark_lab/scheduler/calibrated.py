"""A scheduler that is told calibrated confidences."""

from dspark_lab.evaluation.calibration import apply_temperatures
from dspark_lab.hardware.protocol import Floats, Ints
from dspark_lab.scheduler.protocol import Confidence, Load, VerifyScheduler


class Calibrated:
    """``scheduler`` behind the temperatures [K] of ``stages=calibrate``. As lossless as it: slot by slot, nothing moves."""

    def __init__(self, scheduler: VerifyScheduler, temperatures: Floats) -> None:
        self.scheduler, self.temperatures = scheduler, temperatures
        self.confidence: Confidence = scheduler.confidence

    def draft_lengths(self, confidence: Floats | None, load: Load, *, num_draft_tokens: int) -> Ints:
        if confidence is not None and self.confidence != "acceptance":
            confidence = apply_temperatures(confidence, self.temperatures)
        return self.scheduler.draft_lengths(confidence, load, num_draft_tokens=num_draft_tokens)
