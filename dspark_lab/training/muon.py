"""Muon for the matrices of a drafter's layers, AdamW for all else, in the one optimizer that Lightning allows.

Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") steps along the orthogonalised momentum
of a matrix: U V^T of its singular value decomposition. That suits matrices whose rows and columns are directions, not
lookup tables, vocabulary matrices or single rows. The step is scaled to the root mean square of AdamW's (Liu et al. 2025,
"Muon is Scalable for LLM Training", arXiv 2502.16982, section 2.2), so both kinds share learning rate and weight decay.
``torch.optim.Muon`` computes in bf16 only, which takes tens of seconds a step on a CPU without bf16 units.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from dspark_lab.target.precision import has_bfloat16

Kind = Literal["muon", "adamw"]

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Quintic coefficients of Jordan et al.: steepest at 0, so that five steps bring singular values into about [0.7, 1.2]."""
NEWTON_SCHULZ_STEPS = 5


def kinds(module: nn.Module) -> dict[str, Kind]:
    """Name of each trainable parameter -> which rule steps it.

    Muon takes the weights of ``nn.Linear`` with at least two rows and columns, except those of ``module.head_modules()``
    (where there is such a method): they lead from or to the vocabulary.
    """
    heads = {part for head in getattr(module, "head_modules", list)() for part in head.modules()}
    matrices = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, nn.Linear) and part not in heads and min(part.weight.shape) > 1
    }
    trainable = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {name: "muon" if id(parameter) in matrices else "adamw" for name, parameter in trainable.items()}


def orthogonalise(matrix: Tensor) -> Tensor:
    """About U V^T of ``matrix`` [m, n] = U S V^T, by Newton-Schulz steps in ``matrix``'s dtype."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # the products are as small as the smaller side
    x = x / x.norm().clamp(min=1e-7)  # singular values into [0, 1]
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class MuonAdamW(Optimizer):
    """Each parameter group is stepped by its ``kind``. Parameters without a gradient are left as they are.

    ``groups``: dicts with ``params``, ``kind`` and ``weight_decay`` (decoupled, times ``lr``).
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["kind"] == "muon":
                for parameter in parameters:
                    self._muon(parameter, group)
            elif parameters:
                self._adamw(parameters, group)
        return loss

    def _muon(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        # A running mean instead of a sum: its scale is lost in the orthogonalisation.
        state["momentum"].lerp_(gradient, 1 - group["momentum"])
        nesterov = gradient.lerp(state["momentum"], group["momentum"])
        like_adamw = 0.2 * max(parameter.shape) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(_orthogonal(nesterov), alpha=-group["lr"] * like_adamw)

    def _adamw(self, parameters: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            list(parameters),
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _orthogonal(update: Tensor) -> Tensor:
    """``orthogonalise`` in the dtype that suits the hardware; of a sharded matrix, this rank's shard of the whole one's."""
    if isinstance(update, DTensor):
        whole = _orthogonal(update.full_tensor())
        replicated = DTensor.from_local(whole, update.device_mesh, [Replicate()] * update.device_mesh.ndim)
        return replicated.redistribute(placements=update.placements)
    return orthogonalise(update.to(_dtype(update.device))).to(update.dtype)


@cache
def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if has_bfloat16(device) else torch.float32
