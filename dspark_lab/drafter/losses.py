"""Loss terms per slot, and the walk that keeps no [slots, vocabulary] tensor longer than its chunk.

Convention: p is the target's distribution (no gradient), q the drafter's; all softmaxes in fp32, at temperature 1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

TERMS = ("ce", "soft_ce", "kl", "reverse_kl", "js", "tv", "l1", "nla", "lk")
"""What an objective may weigh, by ``Divergences``' property; a drafter may add terms of its own (DSpark: confidence)."""


class Divergences:
    """How far q is from p in each slot, each [...], every softmax taken once (algorithms.md 4.1-4.3).

    ``logits`` and ``teacher_logits`` [..., V_d]; ``labels`` [...] draft ids or None for the target's own arg-max;
    ``counted`` [...]: False where ``ce`` has no label in the draft vocabulary and is 0.
    """

    def __init__(
        self,
        logits: Tensor,
        teacher_logits: Callable[[], Tensor],
        labels: Tensor | None,
        counted: Tensor | None = None,
    ) -> None:
        self._logits, self._teacher_logits, self._labels, self._counted = logits, teacher_logits, labels, counted

    @cached_property
    def log_q(self) -> Tensor:
        return self._logits.float().log_softmax(-1)

    @cached_property
    def q(self) -> Tensor:
        return self.log_q.exp()

    @cached_property
    def log_p(self) -> Tensor:
        return self._teacher_logits().float().log_softmax(-1)

    @cached_property
    def p(self) -> Tensor:
        return self.log_p.exp()

    @cached_property
    def ce(self) -> Tensor:
        """-log q[label]."""
        labels = self.log_p.argmax(-1) if self._labels is None else self._labels
        ce = -self.log_q.gather(-1, labels[..., None]).squeeze(-1)
        return ce if self._counted is None else ce * self._counted

    @property
    def label_probability(self) -> Tensor:
        """q[label] without gradient; 0 for a label outside the draft vocabulary, which no proposal can match."""
        probability = torch.exp(-self.ce.detach())
        return probability if self._counted is None else probability * self._counted

    @cached_property
    def soft_ce(self) -> Tensor:
        """-sum_v p_v log q_v."""
        return -(self.p * self.log_q).sum(-1)

    @cached_property
    def kl(self) -> Tensor:
        """KL(p || q): soft cross-entropy less the entropy of p."""
        return (self.p * (self.log_p - self.log_q)).sum(-1)

    @cached_property
    def reverse_kl(self) -> Tensor:
        """KL(q || p)."""
        return (self.q * (self.log_q - self.log_p)).sum(-1)

    @cached_property
    def js(self) -> Tensor:
        """Jensen-Shannon: (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2."""
        log_m = torch.logaddexp(self.log_p, self.log_q) - log(2.0)
        return 0.5 * (self.p * (self.log_p - log_m) + self.q * (self.log_q - log_m)).sum(-1)

    @cached_property
    def tv(self) -> Tensor:
        """1/2 sum_v |p_v - q_v|; 1 - TV is the probability that verification accepts a draw from q."""
        return 0.5 * (self.p - self.q).abs().sum(-1)

    @cached_property
    def l1(self) -> Tensor:
        """|p - q|_1 = 2 TV, the DSpark paper's term."""
        return 2.0 * self.tv

    @cached_property
    def acceptance(self) -> Tensor:
        """sum_v min(p_v, q_v) = 1 - TV, exact also where it is small."""
        return torch.minimum(self.p, self.q).sum(-1)

    @cached_property
    def nla(self) -> Tensor:
        """-log of the acceptance probability, which is kept at 1e-5 or more (Samarin et al. 2026, arXiv 2602.23881)."""
        return -self.acceptance.clamp(min=1e-5).log()

    @cached_property
    def lk(self) -> Tensor:
        """w KL + (1 - w) TV with w = exp(-3 (1 - TV)) without gradient (the same paper's hybrid)."""
        weight = torch.exp(-3.0 * self.acceptance.detach())
        return weight * self.kl + (1.0 - weight) * self.tv


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


Summands = Callable[[slice, Tensor], Mapping[str, Tensor]]
"""(blocks, their hidden states) -> sum over the slots of each term."""


def walk_chunks(
    summands: Summands,
    hidden: Tensor,
    *,
    weights: Mapping[str, float],
    denominator: Tensor,
    parameters: Sequence[Tensor],
    chunk_blocks: int,
) -> LossTerms:
    """sum_term weight * (sum over slots of the term), chunk by chunk of whole blocks.

    ``hidden`` [A, S, H]; ``parameters`` are those that ``summands`` uses besides. With gradients on, each chunk's gradient
    is computed right after its loss, so logits live once, in one chunk, and nothing is computed twice.
    """
    sums = {name: torch.zeros((), device=hidden.device) for name in weights}

    def evaluate(blocks: slice, states: Tensor) -> Tensor:
        terms = summands(blocks, states)
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
