"""Step times to schedule by: published, and with the shapes that trouble a scheduler."""

from dataclasses import dataclass

import numpy as np

from dspark_lab.hardware.protocol import StepShape

# DeepSeek-V4-Flash, TP4, B300: vLLM blog of 2026-08-14, figure 2, digitised. Milliseconds by tokens; a step is as slow as
# the next captured graph, and there is none beyond 1008 tokens.
V4_FLASH_VERIFY_MS = {
    1: 5.162, 8: 5.592, 16: 6.084, 32: 6.827, 64: 8.214, 96: 9.048, 128: 9.904, 144: 11.32, 240: 11.508, 256: 12.52,
    288: 13.904, 432: 15.665, 576: 16.662, 768: 17.905, 880: 19.162, 1008: 20.634,
}  # fmt: skip
V4_FLASH_BEYOND_MS = ((1009, 104.489), (2047, 104.489), (4097, 133.452), (16384, 234.892))
V4_FLASH_DRAFT_MS = {1: 0.917, 8: 1.317, 32: 1.877, 64: 2.317, 128: 3.306, 192: 4.443, 256: 5.38}


@dataclass(frozen=True)
class Curve:
    """Verify seconds at token counts: the next one's (``stairs``), or between them on a line; draft by requests."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    beyond: tuple[tuple[int, float], ...] = ()
    stairs: bool = False
    draft_s: float = 0.0

    def verify_time_s(self, shape: StepShape):
        asked = np.asarray(shape.num_verify_tokens) + shape.num_prefill_tokens + shape.num_context_tokens * 0.0
        if self.stairs:
            place = np.searchsorted(self.tokens, asked, side="left").clip(max=len(self.tokens) - 1)
            inside = np.asarray(self.seconds)[place]
        else:
            inside = np.interp(asked, self.tokens, self.seconds)
        if not self.beyond:
            return inside
        tokens, seconds = np.array(self.beyond).T
        return np.where(asked > self.tokens[-1], np.interp(asked, tokens, seconds), inside)

    def draft_time_s(self, *, num_requests: int, num_context_tokens: int = 0) -> float:
        if self.draft_s:
            return self.draft_s
        return float(np.interp(num_requests, list(V4_FLASH_DRAFT_MS), list(V4_FLASH_DRAFT_MS.values()))) / 1000


V4_FLASH = Curve(
    tuple(V4_FLASH_VERIFY_MS),
    tuple(ms / 1000 for ms in V4_FLASH_VERIFY_MS.values()),
    beyond=tuple((tokens, ms / 1000) for tokens, ms in V4_FLASH_BEYOND_MS),
    stairs=True,
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
