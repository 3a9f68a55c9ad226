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
from dspark_lab.drafter.context import DraftContext
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
        proposals = [
            Proposal(request.context.token_ids.new_empty(0))
            if drafter is None
            else drafter.propose(
                request.context,
                num_draft_tokens=num_draft_tokens,
                sampling=GREEDY if draft_greedily else sampling,
                generator=generator,
            )
            for request in running
        ]
        drafts = _drafts(proposals, _draft_lengths(scheduler, running, proposals))
        anchors = drafts.token_ids.new_tensor([[request.context.anchor_token_id] for request in running])
        fed = torch.cat([anchors, drafts.token_ids], dim=1)
        assert drafts.lengths is not None
        output = verifier.forward(fed, drafts.lengths + 1)
        verdicts = verify_drafts(
            output.logits, drafts, sampling=sampling, verification=verification, generator=generator
        )
        verifier.keep(verdicts.num_accepted + 1)
        rows = zip(
            running, proposals, drafts.lengths.tolist(), verdicts.num_accepted.tolist(), verdicts.bonus_token_ids.tolist(),
            strict=True,
        )  # fmt: skip
        for row, (request, proposal, length, accepted, bonus) in enumerate(rows):
            known = slice(0, accepted + 1)
            emitted = cut(
                [*fed[row, 1 : accepted + 1].tolist(), bonus],
                max_tokens=sampling.max_new_tokens - len(request.token_ids),
                eos_token_ids=eos_token_ids,
            )
            request.emit(emitted, proposal, num_verified=length)
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


def _draft_lengths(scheduler: VerifyScheduler, running: Sequence[_Request], proposals: Sequence[Proposal]) -> list[int]:
    load = Load(
        len(running),
        num_context_tokens=sum(request.context.position for request in running),
        request_ids=np.array([request.name for request in running]),
    )
    widths = {proposal.token_ids.numel() for proposal in proposals}
    assert len(widths) == 1, "drafts of unlike widths"
    assert scheduler.confidence != "acceptance"
    told = [proposal.confidence_by(scheduler.confidence) for proposal in proposals]
    known = [confidence for confidence in told if confidence is not None]
    confidence = torch.stack(known).double().cpu().numpy() if known else None
    return scheduler.draft_lengths(confidence, load, num_draft_tokens=widths.pop()).tolist()


def _drafts(proposals: Sequence[Proposal], lengths: Sequence[int]) -> Drafts:
    """One batch, as wide as its longest."""
    widest = max(lengths)
    token_ids = torch.stack([proposal.token_ids[:widest] for proposal in proposals])
    distributions = [proposal.probabilities[:widest] for proposal in proposals if proposal.probabilities is not None]
    return Drafts(token_ids, torch.stack(distributions) if distributions else None, token_ids.new_tensor(lengths))
