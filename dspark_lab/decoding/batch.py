"""Decoding several sequences together under a scheduler: every step drafts for all and verifies what it is told to.

The accounting of each sequence is that of ``decoding/loop.py``. Sequences that have ended leave the batch; none joins.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspark_lab.decoding.loop import GREEDY, Decoded, Proposer, cut
from dspark_lab.decoding.sampling import draw, probabilities
from dspark_lab.decoding.verification import Drafts, Verification, verify_drafts
from dspark_lab.drafter.context import DraftContext, anchors_of
from dspark_lab.records import Proposal, Sampling, VerifyStep
from dspark_lab.scheduler.protocol import Load, VerifyScheduler
from dspark_lab.target.protocol import VerifyOutput


class BatchVerifier(Protocol):
    """A target with a cache for several sequences."""

    def forward(self, token_ids: Tensor, lengths: Tensor) -> VerifyOutput: ...

    def keep(self, num_tokens: Tensor) -> None: ...

    def select(self, rows: Tensor) -> None: ...


@dataclass(slots=True)
class _Request:
    """A sequence of the batch; ``steps`` record how many drafts were verified, which may be fewer than were drafted."""

    name: int
    context: DraftContext
    token_ids: list[int]
    steps: list[VerifyStep] = field(default_factory=list)

    def emit(self, token_ids: Sequence[int], proposal: Proposal, *, num_verified: int) -> None:
        position, accepted = self.context.position, len(token_ids) - 1
        self.steps.append(VerifyStep.of(position, proposal, num_verified=num_verified, num_accepted=accepted))
        self.token_ids += token_ids


@torch.inference_mode()
def decode_batch(
    verifier: BatchVerifier,
    drafter: Proposer | None,
    prompts: Sequence[Tensor],
    *,
    scheduler: VerifyScheduler,
    sampling: Sampling,
    num_draft_tokens: int,
    eos_token_ids: Collection[int],
    verification: Verification = "token",
    generator: torch.Generator | None = None,
    draft_greedily: bool = False,
) -> tuple[Decoded, ...]:
    """Continue every prompt [n], each with the target's own distribution, in the order of the prompts.

    ``drafter`` None is plain decoding. ``verifier`` has an empty cache. All sequences share ``generator``, so a sampled
    text depends on the others in its batch.

    Raises:
        ValueError: a scheduler that would have to know what will be accepted.
    """
    if scheduler.confidence == "acceptance":
        raise ValueError("scheduler=oracle needs to know what will be accepted, which decoding does not: simulate it")
    requests = _prefill(verifier, prompts, sampling, generator)
    running = _leave(requests, verifier, sampling, eos_token_ids)
    while running:
        contexts = [request.context for request in running]
        anchors = anchors_of(contexts)[:, None]
        proposal = Proposal(anchors[:, :0])
        if drafter is not None:
            proposal = drafter.propose(
                contexts,
                num_draft_tokens=num_draft_tokens,
                sampling=GREEDY if draft_greedily else sampling,
                generator=generator,
            )
        drafts = _drafts(proposal, _draft_lengths(scheduler, running, proposal))
        fed = torch.cat([anchors, drafts.token_ids], dim=1)
        assert drafts.lengths is not None
        output = verifier.forward(fed, drafts.lengths + 1)
        verdicts = verify_drafts(
            output.logits, drafts, sampling=sampling, verification=verification, generator=generator
        )
        verifier.keep(verdicts.num_accepted + 1)
        told = (drafts.lengths, verdicts.num_accepted, verdicts.bonus_token_ids)
        rows = zip(running, *(each.tolist() for each in told), strict=True)
        for row, (request, length, accepted, bonus) in enumerate(rows):
            known = slice(0, accepted + 1)
            emitted = cut(
                [*fed[row, 1 : accepted + 1].tolist(), bonus],
                max_tokens=sampling.max_new_tokens - len(request.token_ids),
                eos_token_ids=eos_token_ids,
            )
            request.emit(emitted, proposal[row], num_verified=length)
            request.context.advance(fed[row, known], output.hidden_states[row, known], bonus)
        running = _leave(running, verifier, sampling, eos_token_ids)
    return tuple(Decoded(tuple(request.token_ids), tuple(request.steps)) for request in requests)


def _prefill(
    verifier: BatchVerifier, prompts: Sequence[Tensor], sampling: Sampling, generator: torch.Generator | None
) -> list[_Request]:
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=prompts[0].device)
    output = verifier.forward(pad_sequence(list(prompts), batch_first=True), lengths)
    verifier.keep(lengths)
    last = output.logits[torch.arange(len(prompts), device=lengths.device), lengths - 1]
    first = last.argmax(-1) if sampling.greedy else draw(probabilities(last, sampling), generator)
    return [
        _Request(name, DraftContext.start(prompt, output.hidden_states[name, : len(prompt)], anchor), [anchor])
        for name, (prompt, anchor) in enumerate(zip(prompts, first.tolist(), strict=True))
    ]


def _leave(
    requests: Sequence[_Request], verifier: BatchVerifier, sampling: Sampling, eos_token_ids: Collection[int]
) -> list[_Request]:
    """The requests that go on; the cache forgets the others."""
    stay = [
        len(request.token_ids) < sampling.max_new_tokens and request.token_ids[-1] not in eos_token_ids
        for request in requests
    ]
    if any(stay) and not all(stay):
        device = requests[0].context.token_ids.device
        verifier.select(torch.tensor([row for row, stays in enumerate(stay) if stays], device=device))
    return [request for request, stays in zip(requests, stay, strict=True) if stays]


def _draft_lengths(scheduler: VerifyScheduler, running: Sequence[_Request], proposal: Proposal) -> list[int]:
    load = Load(
        len(running),
        num_context_tokens=sum(request.context.position for request in running),
        request_ids=np.array([request.name for request in running]),
    )
    assert scheduler.confidence != "acceptance"
    told = proposal.confidence_by(scheduler.confidence)
    confidence = None if told is None else told.double().cpu().numpy()
    return scheduler.draft_lengths(confidence, load, num_draft_tokens=proposal.token_ids.shape[1]).tolist()


def _drafts(proposal: Proposal, lengths: Sequence[int]) -> Drafts:
    """As wide as the longest."""
    widest = max(lengths)
    distributions = None if proposal.probabilities is None else proposal.probabilities[:, :widest]
    return Drafts(proposal.token_ids[:, :widest], distributions, proposal.token_ids.new_tensor(lengths))
