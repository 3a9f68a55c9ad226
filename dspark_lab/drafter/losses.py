"""Sums of loss terms over slots, and the walk that keeps no [slots, vocabulary] tensor longer than its chunk."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def confidence_loss(confidence_logits: Tensor, acceptance: Tensor) -> Tensor:
    """Binary cross-entropy against the analytic acceptance probability, which gets no gradient (equation 12)."""
    target = acceptance.detach().clamp(0.0, 1.0)
    return F.binary_cross_entropy_with_logits(confidence_logits.float(), target, reduction="none")


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Sums over slots, still to be divided. ``numerator`` carries the gradient, ``sums`` are the unweighted terms."""

    numerator: Tensor
    sums: Mapping[str, Tensor]
    denominator: Tensor

    @property
    def total(self) -> Tensor:
        return self.numerator / self.denominator.clamp(min=1e-6)

    @property
    def terms(self) -> dict[str, Tensor]:
        return {name: value / self.denominator.clamp(min=1e-6) for name, value in self.sums.items()}


Summands = Callable[[slice, Tensor], tuple[Tensor, Mapping[str, Tensor]]]
"""(blocks, their hidden states) -> weighted sum over slots and terms, with gradient; and the sum of each term, without."""


def walk_chunks(
    summands: Summands,
    hidden: Tensor,
    *,
    terms: Sequence[str],
    denominator: Tensor,
    parameters: Sequence[Tensor],
    chunk_blocks: int,
) -> LossTerms:
    """The sums of ``summands`` over chunks of whole blocks.

    ``hidden`` [A, S, H]; ``parameters`` are those that ``summands`` uses besides; ``terms`` the names that it gives. With
    gradients on, each chunk's gradient is computed right after its loss, so logits live once, in one chunk, and nothing is
    computed twice.
    """
    sums = {name: torch.zeros((), device=hidden.device) for name in terms}

    def evaluate(blocks: slice, states: Tensor) -> Tensor:
        value, found = summands(blocks, states)
        assert found.keys() == sums.keys(), (found.keys(), sums.keys())
        for name, term in found.items():
            sums[name] += term.detach()
        return value

    if torch.is_grad_enabled() and hidden.requires_grad:
        total = _GradientInForward.apply(evaluate, chunk_blocks, hidden, *parameters)
    else:
        total = sum(
            (evaluate(blocks, hidden[blocks]) for blocks in _chunks(hidden.shape[0], chunk_blocks)),
            torch.zeros((), device=hidden.device),
        )
    assert isinstance(total, Tensor)
    return LossTerms(total, sums, denominator)


def _chunks(num_blocks: int, chunk_blocks: int) -> list[slice]:
    return [slice(start, min(start + chunk_blocks, num_blocks)) for start in range(0, num_blocks, chunk_blocks)]


class _GradientInForward(torch.autograd.Function):
    """Sum of ``evaluate`` over chunks; its gradient is ready when the forward pass ends and only scaled in the backward."""

    @staticmethod
    def forward(
        ctx, evaluate: Callable[[slice, Tensor], Tensor], chunk_blocks: int, hidden: Tensor, *parameters: Tensor
    ):
        total = torch.zeros((), device=hidden.device)
        gradients = [torch.zeros_like(tensor) for tensor in (hidden, *parameters)]
        for blocks in _chunks(hidden.shape[0], chunk_blocks):
            states = hidden[blocks].detach().requires_grad_()
            with torch.enable_grad():
                value = evaluate(blocks, states)
            # A parameter whose terms have no weight is not used: its gradient stays zero, which DDP waits for.
            chunk = torch.autograd.grad(value, (states, *parameters), allow_unused=True)
            for gradient, addend in zip((gradients[0][blocks], *gradients[1:]), chunk, strict=True):
                if addend is not None:
                    gradient += addend
            total += value.detach()
        ctx.gradients = gradients
        return total

    @staticmethod
    def backward(ctx, *upstream: Tensor):
        return None, None, *(upstream[0] * gradient for gradient in ctx.gradients)
