"""Decoding one sequence: speculatively with a drafter, and plainly as its baseline.

Both take the first new token from the prefill. Every verify step then emits its accepted drafts and a bonus token, cut
after the first end token and at ``max_new_tokens``; a step's ``num_accepted`` is what it emitted minus one, so that
1 + accepted / steps is exactly the number of tokens emitted per step.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark_lab.decoding.sampling import draw, probabilities
from dspark_lab.decoding.verification import Verification, verify
from dspark_lab.drafter.context import DraftContext
from dspark_lab.records import Proposal, Sampling, VerifyStep
from dspark_lab.target.protocol import Verifier

GREEDY = Sampling()


class Proposer(Protocol):
    """What decoding needs of a drafter: drafts for R sequences at once, [R, K] (``Proposal``).

    ``forced_token_ids`` [R, K]: follow these tokens instead of drawing from q.
    """

    def propose(
        self,
        contexts: Sequence[DraftContext],
        *,
        num_draft_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
        forced_token_ids: Tensor | None = None,
    ) -> Proposal: ...


@dataclass(frozen=True, slots=True)
class Decoded:
    """The new tokens of one prompt (end token included) and the verify steps that emitted all but the first."""

    token_ids: tuple[int, ...]
    steps: tuple[VerifyStep, ...] = ()


@torch.inference_mode()
def speculative_decode(
    verifier: Verifier,
    drafter: Proposer,
    prompt_ids: Tensor,
    *,
    sampling: Sampling,
    num_draft_tokens: int,
    eos_token_ids: Collection[int],
    generator: torch.Generator | None = None,
    draft_greedily: bool = False,
    verification: Verification = "token",
) -> Decoded:
    """Continue ``prompt_ids`` [n] with the target's own distribution, several tokens per target forward.

    ``verifier`` has an empty cache. ``generator`` (on the target's device) serves draws of drafts and of verification.
    ``draft_greedily`` lets the drafter propose its argmax although the target samples (vLLM's default).
    Drafting is at full width up to the last step; a drafter may return fewer tokens, or none.
    """
    prefill = verifier.forward(prompt_ids)
    anchor = _draw_next(prefill.logits[-1], sampling, generator)
    token_ids, steps = [anchor], []
    context = DraftContext.start(prompt_ids, prefill.hidden_states, anchor)
    while not _finished(token_ids, sampling, eos_token_ids):
        position = context.position
        proposal = drafter.propose(
            [context],
            num_draft_tokens=num_draft_tokens,
            sampling=GREEDY if draft_greedily else sampling,
            generator=generator,
        )[0]
        fed = torch.cat([prompt_ids.new_tensor([context.anchor_token_id]), proposal.token_ids])
        output = verifier.forward(fed)
        verdict = verify(output.logits, proposal, sampling=sampling, verification=verification, generator=generator)
        known = verdict.num_accepted + 1  # the anchor and the accepted drafts have states now
        emitted = cut(
            [*fed[1:known].tolist(), verdict.bonus_token_id],
            max_tokens=sampling.max_new_tokens - len(token_ids),
            eos_token_ids=eos_token_ids,
        )
        token_ids += emitted
        steps.append(VerifyStep.of(position, proposal, num_verified=fed.numel() - 1, num_accepted=len(emitted) - 1))
        verifier.rollback(fed.numel() - known)
        context.advance(fed[:known], output.hidden_states[:known], verdict.bonus_token_id)
    return Decoded(tuple(token_ids), tuple(steps))


@torch.inference_mode()
def plain_decode(
    verifier: Verifier,
    prompt_ids: Tensor,
    *,
    sampling: Sampling,
    eos_token_ids: Collection[int],
    generator: torch.Generator | None = None,
) -> Decoded:
    """The same target without a drafter, one token per forward: the baseline of text and of speed."""
    fed, token_ids = prompt_ids, []
    while not _finished(token_ids, sampling, eos_token_ids):
        token_ids.append(_draw_next(verifier.forward(fed).logits[-1], sampling, generator))
        fed = prompt_ids.new_tensor(token_ids[-1:])
    return Decoded(tuple(token_ids))


def cut(token_ids: Sequence[int], *, max_tokens: int, eos_token_ids: Collection[int]) -> list[int]:
    """The tokens up to the first end token, itself included, and at most ``max_tokens`` of them."""
    kept = list(token_ids[:max_tokens])
    ends = [index for index, token_id in enumerate(kept) if token_id in eos_token_ids]
    return kept[: ends[0] + 1] if ends else kept


def _draw_next(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """Next token from logits [V]."""
    if sampling.greedy:
        return int(logits.argmax(-1))
    return int(draw(probabilities(logits, sampling), generator))


def _finished(token_ids: Sequence[int], sampling: Sampling, eos_token_ids: Collection[int]) -> bool:
    return len(token_ids) >= sampling.max_new_tokens or (bool(token_ids) and token_ids[-1] in eos_token_ids)
