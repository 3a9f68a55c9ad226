"""Which drafted tokens stand, and what follows them. Pure functions; all arithmetic in fp32.

Token-wise rejection sampling: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding",
section 2.3 and appendix A.1; Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling".
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_lab.decoding.sampling import draw, probabilities
from dspark_lab.records import Proposal, Sampling, Verdict

RESIDUAL_FLOOR = 1e-8
"""A residual of less mass is rounding: p and q agree there, and p itself is drawn from."""


def verify(
    target_logits: Tensor, proposal: Proposal, *, sampling: Sampling, generator: torch.Generator | None = None
) -> Verdict:
    """Verdict on K drafts from the target's logits [K + 1, V]; row k says what the target expects in slot k."""
    if sampling.greedy:
        return verify_greedy(target_logits, proposal.token_ids)
    return verify_rejection(probabilities(target_logits, sampling), proposal, generator=generator)


def verify_greedy(target_logits: Tensor, draft_token_ids: Tensor) -> Verdict:
    """Accept drafts [K] while they are the argmax of the logits [K + 1, V]; the next argmax is the bonus token."""
    assert target_logits.shape[0] == draft_token_ids.numel() + 1, (target_logits.shape, draft_token_ids.shape)
    choices = target_logits.argmax(-1)
    num_accepted = _leading(choices[:-1] == draft_token_ids)
    return Verdict(num_accepted, int(choices[num_accepted]))


def verify_rejection(
    target_probabilities: Tensor, proposal: Proposal, *, generator: torch.Generator | None = None
) -> Verdict:
    """Token-wise rejection: what it emits is distributed exactly as ``target_probabilities`` [K + 1, V].

    A draft d drawn from q stands with probability min(1, p(d) / q(d)); the first that falls is replaced by a draw from
    the residual max(p - q, 0); after K accepted drafts the bonus token is drawn from row K. A proposal without
    probabilities is argmax, q is one-hot: d stands with probability p(d), the residual is p without d. q may be zero on
    tokens that the drafter does not know, and K may be 0. ``generator`` lives on the probabilities' device.
    """
    drafts = proposal.token_ids
    num_drafts = drafts.numel()
    assert target_probabilities.shape[0] == num_drafts + 1, (target_probabilities.shape, drafts.shape)
    p = target_probabilities.float()
    stand = acceptance_probabilities(p[:-1], proposal)
    uniform = torch.rand(num_drafts, generator=generator, device=p.device)
    num_accepted = _leading(uniform < stand)
    if num_accepted == num_drafts:
        return Verdict(num_accepted, int(draw(p[-1], generator)))
    rest = residual(p[num_accepted], _draft_distribution(proposal, num_accepted, p.shape[-1]))
    return Verdict(num_accepted, int(draw(rest, generator)))


def acceptance_probabilities(target_probabilities: Tensor, proposal: Proposal) -> Tensor:
    """min(1, p(d_k) / q(d_k)) of each drafted token, fp32 [K], given that those before it stand; p is [K, V]."""
    p = _of_tokens(target_probabilities.float(), proposal.token_ids)
    if proposal.probabilities is None:
        return p
    q = _of_tokens(proposal.probabilities.float(), proposal.token_ids)
    # Never a token of p = 0, not even from a drafter that claims q = 0 for what it drew.
    return torch.where(q > p, p / q, (p > 0).float())


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What the target still wants where the drafter's token fell: max(p - q, 0), normalised, fp32 [V]."""
    rest = (p.float() - q.float()).clamp_min(0.0)
    mass = rest.sum()
    return torch.where(mass > RESIDUAL_FLOOR, rest / mass.clamp_min(RESIDUAL_FLOOR), p.float())


def _draft_distribution(proposal: Proposal, slot: int, vocab_size: int) -> Tensor:
    """q of one slot, [V]."""
    if proposal.probabilities is None:
        return F.one_hot(proposal.token_ids[slot], vocab_size).float()
    return proposal.probabilities[slot]


def _of_tokens(distributions: Tensor, token_ids: Tensor) -> Tensor:
    """Probability of each row's own token: [K, V], [K] -> [K]."""
    return distributions.gather(-1, token_ids[:, None]).squeeze(-1)


def _leading(accepted: Tensor) -> int:
    """How many of [K] are True before the first False."""
    return int(accepted.long().cumprod(0).sum())
