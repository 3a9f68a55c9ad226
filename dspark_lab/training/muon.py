"""Muon for the matrices of a drafter's layers and AdamW for the rest, as the one optimizer that Lightning allows.

Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") orthogonalises the momentum of a matrix.
That only makes sense where rows and columns are directions: not for embeddings, vocabulary matrices, or [1, N] weights.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from dspark_lab.validation import checked


class MuonAdamW:
    """Recipe. With ``match_rms_adamw`` a Muon step is as large as AdamW's, so both share ``lr`` and its schedule."""

    @checked
    def __init__(
        self,
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        if lr <= 0:
            raise ValueError(f"lr={lr} must be positive; 1e-3 to 5e-3 suits small targets")
        self.lr, self.momentum, self.betas, self.eps, self.weight_decay = lr, momentum, betas, eps, weight_decay

    def build(self, module: nn.Module) -> Optimizer:
        matrices, others = split_by_kind(module)
        muon = Muon(
            matrices,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        adamw = AdamW(others, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=0.0)
        return Joined([muon, adamw])


def split_by_kind(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(parameters for Muon, all others), trainable ones only.

    Muon gets weights of ``nn.Linear`` with more than one row and column that are not part of ``module.head_modules()``.
    """
    heads = {id(p) for head in getattr(module, "head_modules", list)() for p in head.parameters()}
    linear = {
        id(part.weight) for part in module.modules() if isinstance(part, nn.Linear) and min(part.weight.shape) > 1
    }
    trainable = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trainable if id(p) in linear - heads]
    return matrices, [p for p in trainable if id(p) not in linear - heads]


class Joined(Optimizer):
    """Several optimizers as one: their groups side by side, for the lr schedule; one step, one state dict."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        # Loading made new group objects; the lr schedule must go on turning those that are stepped.
        self.param_groups = [group for part in self.parts for group in part.param_groups]
