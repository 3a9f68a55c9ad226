"""Which drafted tokens stand, and what follows them. Pure functions; all arithmetic in fp32.

Token-wise rejection sampling: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding",
section 2.3 and appendix A.1; Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling".
Block verification: Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444, algorithm 2.

Leading dimensions ("...") are requests; there may be none. Requests of one batch may have drafts of different lengths:
past a request's length q is zero, and both methods then draw the bonus token from p itself. So a proposal may be
truncated, as long as whether slot k is verified was decided without knowing what was drafted in slot k or later
(``docs/schedulers.md``).
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_lab.decoding.sampling import draw, probabilities
from dspark_lab.records import Proposal, Sampling, Verdict

Verification = Literal["token", "block"]

RESIDUAL_FLOOR = 1e-8
"""A residual of less mass is rounding: p and q agree there, and p itself is drawn from."""
SMALLEST_Q = 1e-20
"""Below this a drafter claims that it could not have drawn what it drew; the token stands wherever p is not zero."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafted tokens of requests. ``lengths`` [...]: how many of the K slots are to be verified (None: all).

    ``probabilities`` [..., K, V] are what the tokens were drawn from, zero where the drafter does not know a token; None
    for arg-maxima. What lies past ``lengths`` is not read.
    """

    token_ids: Tensor  # int64 [..., K], target ids
    probabilities: Tensor | None = None
    lengths: Tensor | None = None

    def verified(self) -> Tensor:
        """bool [..., K]: the slots within ``lengths``."""
        slots = torch.arange(self.token_ids.shape[-1], device=self.token_ids.device)
        if self.lengths is None:
            return torch.ones_like(self.token_ids, dtype=torch.bool)
        return slots < self.lengths[..., None]

    def distributions(self, vocab_size: int) -> Tensor:
        """q, fp32 [..., K + 1, V]: one-hot for arg-maxima, zero past the end."""
        q = F.one_hot(self.token_ids, vocab_size) if self.probabilities is None else self.probabilities
        return F.pad(torch.where(self.verified()[..., None], q.float(), 0.0), (0, 0, 0, 1))


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Of each request: the first ``num_accepted`` drafts stand, then ``bonus_token_ids`` follows; both int64 [...]."""

    num_accepted: Tensor
    bonus_token_ids: Tensor


def verify(
    target_logits: Tensor,
    proposal: Proposal,
    *,
    sampling: Sampling,
    verification: Verification = "token",
    generator: torch.Generator | None = None,
) -> Verdict:
    """Verdict on K drafts from the target's logits [K + 1, V]; row k says what the target expects in slot k."""
    drafts = Drafts(proposal.token_ids, proposal.probabilities)
    verdicts = verify_drafts(target_logits, drafts, sampling=sampling, verification=verification, generator=generator)
    return Verdict(int(verdicts.num_accepted), int(verdicts.bonus_token_ids))


def verify_drafts(
    target_logits: Tensor,
    drafts: Drafts,
    *,
    sampling: Sampling,
    verification: Verification = "token",
    generator: torch.Generator | None = None,
) -> Verdicts:
    """Verdicts on a batch from the target's logits [..., K + 1, V]. At temperature 0 both methods are the greedy one."""
    if sampling.greedy:
        return verify_greedy(target_logits, drafts)
    p = probabilities(target_logits, sampling)
    return (verify_block if verification == "block" else verify_token)(p, drafts, generator=generator)


def verify_greedy(target_logits: Tensor, drafts: Drafts) -> Verdicts:
    """Accept drafts while they are the argmax of the logits [..., K + 1, V]; the next argmax is the bonus token."""
    _check(target_logits, drafts)
    choices = target_logits.argmax(-1)
    num_accepted = _leading((choices[..., :-1] == drafts.token_ids) & drafts.verified())
    return Verdicts(num_accepted, choices.gather(-1, num_accepted[..., None]).squeeze(-1))


def verify_token(p: Tensor, drafts: Drafts, *, generator: torch.Generator | None = None) -> Verdicts:
    """Token-wise rejection: what it emits is distributed exactly as ``p`` [..., K + 1, V].

    A draft d drawn from q stands with probability min(1, p(d) / q(d)); the first that falls is replaced by a draw from
    the residual max(p - q, 0); after the last draft the bonus token is drawn from p. Arg-maxima have a one-hot q: d
    stands with probability p(d), the residual is p without d. K may be 0. ``generator`` lives on p's device.
    """
    _check(p, drafts)
    q = drafts.distributions(p.shape[-1])
    stand = token_acceptance(p, q, drafts.token_ids)
    num_accepted = _leading((_uniform(stand, generator) < stand) & drafts.verified())
    return Verdicts(num_accepted, draw(residual(_row(p, num_accepted), _row(q, num_accepted)), generator))


def verify_block(p: Tensor, drafts: Drafts, *, generator: torch.Generator | None = None) -> Verdicts:
    """Block verification: as exact as token-wise rejection, and no method accepts more tokens on average.

    The *longest* prefix whose own coin falls well is accepted, whatever the coins of shorter ones: n = max {i: u_i <
    h_i} (``block_acceptance``). What follows is drawn from the residual max(w_n p - q, 0), with the weight w_n of the
    accepted prefix. Arguments as for ``verify_token``.
    """
    _check(p, drafts)
    q = drafts.distributions(p.shape[-1])
    weights = block_weights(p, q, drafts.token_ids)
    accept = block_acceptance(p, q, weights)
    accepted = (_uniform(accept, generator) < accept) & drafts.verified()
    lengths = torch.arange(1, 1 + accepted.shape[-1], device=p.device)
    num_accepted = F.pad(accepted * lengths, (1, 0)).amax(-1)
    weight = weights.gather(-1, num_accepted[..., None])
    return Verdicts(num_accepted, draw(residual(weight * _row(p, num_accepted), _row(q, num_accepted)), generator))


def token_acceptance(p: Tensor, q: Tensor, token_ids: Tensor) -> Tensor:
    """min(1, p(d_k) / q(d_k)) of each drafted token [..., K], given that those before it stand. p and q: [..., K + 1, V]."""
    return _ratios(p, q, token_ids).clamp_max(1.0)


def block_weights(p: Tensor, q: Tensor, token_ids: Tensor) -> Tensor:
    """Probability that at least i drafts are accepted, [..., K + 1]."""
    return running_weights(_ratios(p, q, token_ids))


def running_weights(ratios: Tensor) -> Tensor:
    """w_0 = 1, w_i = min(1, w_{i-1} ratio_i), fp32 [..., K + 1], of p / q of each draft [..., K]."""
    weight = ratios.new_ones(ratios.shape[:-1], dtype=torch.float32)
    weights = [weight]
    for ratio in ratios.unbind(-1):
        weight = (weight * ratio).clamp_max(1.0)
        weights.append(weight)
    return torch.stack(weights, dim=-1)


def block_acceptance(p: Tensor, q: Tensor, weights: Tensor) -> Tensor:
    """h_i = S_i / (S_i + 1 - w_i) of prefixes 1..K, [..., K], with S_i = sum max(w_i p - q, 0) in slot i + 1.

    Where a request's drafts end q is zero, so S_i = w_i = h_i. Where p = q everywhere h_i is 0 / 0, and 1 as good as 0.
    """
    wanted = (weights[..., None] * p.float() - q.float()).clamp_min(0.0).sum(-1)[..., 1:]
    whole = wanted + 1.0 - weights[..., 1:]
    return torch.where(whole > 0, wanted / whole, 1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What the target still wants where the drafter's token fell: max(p - q, 0), normalised, fp32 [..., V]."""
    rest = (p.float() - q.float()).clamp_min(0.0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > RESIDUAL_FLOOR, rest / mass.clamp_min(RESIDUAL_FLOOR), p.float())


def _ratios(p: Tensor, q: Tensor, token_ids: Tensor) -> Tensor:
    """p(d_k) / q(d_k) of each drafted token, fp32 [..., K]; zero where p is, whatever q claims."""
    p_of, q_of = (values.float()[..., :-1, :].gather(-1, token_ids[..., None]).squeeze(-1) for values in (p, q))
    return p_of / q_of.clamp_min(SMALLEST_Q)


def _row(distributions: Tensor, slot: Tensor) -> Tensor:
    """Each request's distribution in its own slot: [..., K + 1, V], [...] -> [..., V]."""
    index = slot[..., None, None].expand(*slot.shape, 1, distributions.shape[-1])
    return distributions.gather(-2, index).squeeze(-2)


def _leading(accepted: Tensor) -> Tensor:
    """How many of [..., K] are True before the first False."""
    return accepted.long().cumprod(-1).sum(-1)


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(like.shape, generator=generator, device=like.device)


def _check(target: Tensor, drafts: Drafts) -> None:
    num_slots = drafts.token_ids.shape[-1]
    assert target.shape[:-1] == (*drafts.token_ids.shape[:-1], num_slots + 1), (target.shape, drafts.token_ids.shape)
