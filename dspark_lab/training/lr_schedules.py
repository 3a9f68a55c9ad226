"""The learning rate over the steps of a run, as a share of the optimizer's ``lr``."""

import math
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dspark_lab.validation import checked


class LrSchedule:
    """Linear warm-up, a plateau at the peak, then a decay to ``final_share`` of it.

    All four of ``conf/lr_schedule`` are of this form. ``warmup_share`` and ``decay_share`` are shares of the training
    steps; with ``decay_share`` None all steps after the warm-up decay, with 0 none does.
    """

    @checked
    def __init__(
        self,
        *,
        warmup_share: float,
        decay_share: float | None,
        decay_shape: Literal["cosine", "linear"],
        final_share: float,
    ) -> None:
        if not 0 <= warmup_share < 1:
            raise ValueError(f"warmup_share={warmup_share} must lie in [0, 1): it is a share of the training steps")
        if decay_share is not None and not 0 <= decay_share <= 1 - warmup_share:
            raise ValueError(
                f"decay_share={decay_share} must lie in [0, 1 - warmup_share={1 - warmup_share:g}]: it is a share of the "
                "training steps; null decays from the end of the warm-up on"
            )
        if not 0 <= final_share <= 1:
            raise ValueError(f"final_share={final_share} must lie in [0, 1]: it is a share of optimizer.lr")
        if decay_share == 0 and final_share != 1:
            raise ValueError(f"final_share={final_share} is never reached with decay_share=0: set it to 1")
        self.warmup_share, self.decay_share = warmup_share, decay_share
        self.decay_shape, self.final_share = decay_shape, final_share

    def build(self, optimizer: Optimizer, *, num_steps: int) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: self.factor(step, num_steps=num_steps))

    def factor(self, step: int, *, num_steps: int) -> float:
        """Share of the peak lr at optimizer step ``step`` (0-based) of ``num_steps``."""
        warmup = max(round(self.warmup_share * num_steps), 1)
        if step < warmup:
            return (step + 1) / warmup
        start = warmup if self.decay_share is None else num_steps - round(self.decay_share * num_steps)
        progress = min(max(step - start, 0) / max(num_steps - start, 1), 1.0)
        left = 0.5 * (1 + math.cos(math.pi * progress)) if self.decay_shape == "cosine" else 1 - progress
        return self.final_share + (1 - self.final_share) * left
