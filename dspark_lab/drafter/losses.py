"""Loss terms per slot, and the walk that keeps no [slots, vocabulary] tensor longer than its chunk.

Convention: p is the target's distribution (detached), q the drafter's; all softmaxes in fp32, at temperature 1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def exponential_decay(num_slots: int, gamma: float) -> Tensor:
    """exp(-k / gamma) for the predicting slots k = 0..S-1, [S] (algorithms.md 3.6)."""
    return torch.exp(-torch.arange(num_slots) / gamma)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log q[label] per slot: [..., V] and [...] -> [...]."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)


def soft_cross_entropy(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """-sum_v p_v log q_v per slot."""
    return -(teacher_logits.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1)


def total_variation(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """TV = 1/2 sum_v |p_v - q_v| per slot; 1 - TV is the probability that verification accepts a draw from q."""
    return 0.5 * (teacher_logits.float().softmax(-1) - logits.float().softmax(-1)).abs().sum(-1)


def confidence_loss(confidence_logits: Tensor, acceptance: Tensor) -> Tensor:
    """Binary cross-entropy against the analytic acceptance probability, which gets no gradient (equation 12)."""
    target = acceptance.detach().clamp(0.0, 1.0)
    return F.binary_cross_entropy_with_logits(confidence_logits.float(), target, reduction="none")


@dataclass(frozen=True, slots=True)
class LossTerms:
    """``total`` carries the gradient; ``terms`` are the detached, normalised terms before their weights."""

    total: Tensor
    terms: Mapping[str, Tensor]


Objective = Callable[[slice, Tensor], Mapping[str, Tensor]]
"""(blocks, their hidden states) -> sum over the slots of each term."""


def walk_chunks(
    objective: Objective,
    hidden: Tensor,
    *,
    weights: Mapping[str, float],
    denominator: Tensor,
    parameters: Sequence[Tensor],
    chunk_blocks: int,
) -> LossTerms:
    """sum_term weight * (sum over slots of the term) / denominator, chunk by chunk of whole blocks.

    ``hidden`` [A, S, H]; ``parameters`` are those that ``objective`` uses besides. With gradients on, each chunk's gradient
    is computed right after its loss, so logits live once, in one chunk, and nothing is computed twice.
    """
    sums = {name: torch.zeros((), device=hidden.device) for name in weights}

    def evaluate(blocks: slice, states: Tensor) -> Tensor:
        terms = objective(blocks, states)
        assert terms.keys() == weights.keys(), (terms.keys(), weights.keys())
        for name, term in terms.items():
            sums[name] += term.detach()
        return sum((weights[name] * term for name, term in terms.items()), torch.zeros((), device=hidden.device))

    if torch.is_grad_enabled() and hidden.requires_grad:
        total = _GradientInForward.apply(evaluate, chunk_blocks, hidden, *parameters)
    else:
        total = sum(
            (evaluate(blocks, hidden[blocks]) for blocks in _chunks(hidden.shape[0], chunk_blocks)),
            torch.zeros((), device=hidden.device),
        )
    assert isinstance(total, Tensor)
    return LossTerms(total / denominator, {name: value / denominator for name, value in sums.items()})


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
            chunk = torch.autograd.grad(value, (states, *parameters))
            gradients[0][blocks] = chunk[0]
            for gradient, addend in zip(gradients[1:], chunk[1:], strict=True):
                gradient += addend
            total += value.detach()
        ctx.gradients = gradients
        return total

    @staticmethod
    def backward(ctx, *upstream: Tensor):
        return None, None, *(upstream[0] * gradient for gradient in ctx.gradients)
