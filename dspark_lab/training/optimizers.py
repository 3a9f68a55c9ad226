"""Optimizers as plain recipes: typed values that build the torch object when the module is ready."""

from typing import Protocol, runtime_checkable

from torch import nn
from torch.optim import AdamW as TorchAdamW
from torch.optim import Optimizer

from dspark_lab.training.muon import MuonAdamW, kinds
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
        # One pass over memory: a quarter of the time of torch's default, on CPUs too.
        return TorchAdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


class Muon:
    """Muon for the matrices of the layers, AdamW (``betas``, ``eps``) for the rest: see ``training/muon.py``.

    ``lr`` and ``weight_decay`` are AdamW's; a Muon step is scaled to be as large as one of AdamW. No weight decay on
    vectors.
    """

    @checked
    def __init__(
        self, *, lr: float, momentum: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        if lr <= 0:
            raise ValueError(f"lr={lr} must be positive; what suits AdamW suits Muon")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} must lie in [0, 1); 0.95 is usual")
        self.lr, self.momentum, self.betas, self.eps, self.weight_decay = lr, momentum, betas, eps, weight_decay

    def build(self, module: nn.Module) -> Optimizer:
        kind_of = kinds(module)
        found = [(kind_of[name], p) for name, p in module.named_parameters() if p.requires_grad]
        groups = [
            {
                "kind": kind,
                "params": [p for its_kind, p in found if its_kind == kind and (p.ndim >= 2) == decays],
                "weight_decay": self.weight_decay if decays else 0.0,
            }
            for kind, decays in (("muon", True), ("adamw", True), ("adamw", False))
        ]
        return MuonAdamW(groups, lr=self.lr, momentum=self.momentum, betas=self.betas, eps=self.eps)
