"""Step times to schedule by: published, and with the shapes that trouble a scheduler."""

from dataclasses import dataclass

import numpy as np

from dspark_lab.hardware.protocol import StepShape
from dspark_lab.hardware.table import MeasuredHardware, TableProfile


@dataclass(frozen=True)
class Curve:
    """Verify seconds between token counts, on a line; one draft time."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    draft_s: float = 0.0

    def verify_time_s(self, shape: StepShape):
        return np.interp(np.asarray(shape.num_verify_tokens) + shape.num_prefill_tokens, self.tokens, self.seconds)

    def draft_time_s(self, *, num_requests: int, num_context_tokens: int = 0) -> float:
        return self.draft_s


# DeepSeek-V4-Flash, TP4, B300, as published: a staircase of captured graphs, and a jump behind the last.
V4_FLASH = TableProfile.fit(
    MeasuredHardware(name="v4_flash", path="deepseek_v4_flash_b300_tp4", memory_bytes=None).measurement
)
CURVES = {
    "v4_flash": V4_FLASH,
    "affine": Curve((0, 4096), (0.005, 0.045), draft_s=0.001),
    "coverage": Curve(  # a mixture of experts: steep while experts are new, flat after
        tuple(range(0, 4097, 16)),
        tuple(0.004 + 0.012 * (1 - (1 - 1 / 32) ** n) + 1e-6 * n for n in range(0, 4097, 16)),
        draft_s=0.001,
    ),
    "compute_bound": Curve((0, 4096), (0.02, 1.2), draft_s=0.004),
    "memory_bound": Curve((0, 512, 4096), (0.01, 0.0105, 0.05), draft_s=0.0005),
}


def sps(*steps_per_second: float, first: int = 1) -> Curve:
    """The paper's SPS(B) for B = ``first``, ``first`` + 1 ...: whole rounds, so nothing is left for the draft."""
    tokens = tuple(range(first, first + len(steps_per_second)))
    return Curve(tokens, tuple(1 / each - 1e-9 for each in steps_per_second), draft_s=1e-9)
