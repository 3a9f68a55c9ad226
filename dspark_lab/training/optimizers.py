"""Optimizers and lr schedules as plain recipes: typed values that build the torch object when the module is ready."""

import math
from typing import Protocol, runtime_checkable

from torch import nn
from torch.optim import AdamW as TorchAdamW
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dspark_lab.validation import checked


@runtime_checkable  # so that a drafter's checked constructor can tell one
class OptimizerRecipe(Protocol):
    """What a recipe must do: one torch optimizer over the module's trainable parameters."""

    def build(self, module: nn.Module) -> Optimizer: ...


class AdamW:
    """AdamW over all trainable parameters; no weight decay on vectors (norms, biases)."""

    @checked
    def __init__(self, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        if lr <= 0:
            raise ValueError(f"lr={lr} must be positive; 1e-3 suits small targets, 1e-4 to 6e-4 large ones")
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay

    def build(self, module: nn.Module) -> Optimizer:
        trainable = [p for p in module.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
        ]
        return TorchAdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps)


class WarmupCosine:
    """Linear warm-up over a share of the steps, then a cosine down to ``final_share`` of the peak."""

    @checked
    def __init__(self, *, warmup_share: float, final_share: float) -> None:
        if not 0 <= warmup_share < 1:
            raise ValueError(f"warmup_share={warmup_share} must lie in [0, 1): it is a share of the training steps")
        self.warmup_share, self.final_share = warmup_share, final_share

    def build(self, optimizer: Optimizer, *, num_steps: int) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: self.factor(step, num_steps=num_steps))

    def factor(self, step: int, *, num_steps: int) -> float:
        """Share of the peak lr at optimizer step ``step`` (0-based) of ``num_steps``."""
        warmup = max(round(self.warmup_share * num_steps), 1)
        if step < warmup:
            return (step + 1) / warmup
        progress = min((step - warmup) / max(num_steps - warmup, 1), 1.0)
        return self.final_share + (1 - self.final_share) * 0.5 * (1 + math.cos(math.pi * progress))
