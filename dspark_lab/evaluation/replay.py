"""Evaluation without a target forward: walk a recorded answer with its stored states.

Real token-wise rejection accepts draft x with probability min(1, p/q), so it drafts *and* keeps x with probability
min(p(x), q(x)), and it emits x, kept or not, with probability p(x). Given that it emits x, the draft was therefore kept
with probability min(1, q(x) / p(x)). The recorded answer was drawn from p: keeping each recorded token with that
probability, and making the first that is not kept the next anchor, has the distribution of real decoding. An argmax
draft d is a one-hot q: the recorded x is kept with probability min(1, [x = d] / p(x)) = [x = d].

Block verification judges a prefix together with the drafts after it, those that fell included, which a recorded answer
does not hold. They are not needed: summed over them, at least i drafts x_1 .. x_i stand with probability w_i
(``block_weights``; arXiv 2403.10444, appendix), and what is emitted after them is drawn from p whether more stand or
not. So at least i stand, given the whole answer, with probability w_i q(x_1 .. x_i) / p(x_1 .. x_i): x_i is kept,
given that those before it were, with probability min(1, q(x_i) / (w_{i-1} p(x_i))).
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark_lab.decoding.loop import GREEDY, Proposer, cut
from dspark_lab.decoding.sampling import probabilities, prompt_generator
from dspark_lab.decoding.verification import SMALLEST_Q, Verification, running_weights
from dspark_lab.drafter.context import DraftContext
from dspark_lab.evaluation.decode import Progress, silent
from dspark_lab.records import Proposal, Sampling, TargetSample, TokenizedConversation, Trace, VerifyStep
from dspark_lab.target.protocol import TargetHead

CHUNK_TOKENS = 128
"""Answer tokens whose target logits exist at once."""
TOGETHER, TOGETHER_TOKENS = 16, 16384
"""Answers that are drafted for at once, and at most so many tokens (but one answer) whose states are held."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Traces in the order of the conversations, and how many conversations were refused for which reason."""

    traces: tuple[Trace, ...]
    refused: Mapping[str, int]


@torch.inference_mode()
def replay(
    drafter: Proposer,
    sample: TargetSample,
    conversation: TokenizedConversation,
    *,
    sampling: Sampling,
    num_draft_tokens: int,
    target_head: TargetHead,
    eos_token_ids: Collection[int],
    generator: torch.Generator | None = None,
    draft_greedily: bool = False,
    verification: Verification = "token",
) -> Trace:
    """Trace of the last answer of ``conversation`` as decoding would have written it (see the module).

    The accounting is ``speculative_decode``'s: the first token comes from the prefill, the answer ends after its first
    end token and at ``sampling.max_new_tokens``, every step drafts at full width. Where fewer recorded tokens are left
    than slots, the forced tokens are padded with the last one: no slot that matters is conditioned on the padding.
    When drafts are drawn, confidences after a step's first rejected slot are those given the recorded tokens, where
    decoding has those given the rejected draft. ``generator`` is on the head's device. Argmax drafts are kept alike by
    both ways of verification.

    Raises ValueError for an answer that was not recorded at ``sampling``.
    """
    reason = refusal(conversation, sample.loss_mask, sampling=sampling)
    if reason is not None:
        raise ValueError(
            f"conversation {conversation.id!r} cannot be replayed at {sampling}: {reason} (recorded: "
            f"{conversation.sampling}); replay at the recorded sampling, or regenerate the answers at this one"
        )
    walk = _Walk.start(
        sample,
        conversation,
        sampling=sampling,
        target_head=target_head,
        eos_token_ids=eos_token_ids,
        generator=generator,
    )
    how = _How(sampling, num_draft_tokens, draft_greedily or sampling.greedy, verification)
    while walk.remaining:
        _step(drafter, [walk], how)
    return walk.trace


@torch.inference_mode()
def evaluate_replay(
    drafter: Proposer,
    store_get: Callable[[str], TargetSample],
    conversations: Sequence[TokenizedConversation],
    *,
    sampling: Sampling,
    num_draft_tokens: int,
    target_head: TargetHead,
    eos_token_ids: Collection[int],
    seed: int,
    draft_greedily: bool = False,
    verification: Verification = "token",
    progress: Progress = silent,
) -> ReplayResult:
    """Replay every conversation that can be, several at once; the others are counted by reason.

    ``store_get`` returns the sample of a ``TokenizedConversation.key``. Random numbers depend on ``seed`` and the
    conversation's id only. Raises ValueError when none can be replayed.
    """
    refused: Counter[str] = Counter()
    running: dict[int, _Walk] = {}
    traces: dict[int, Trace] = {}
    how = _How(sampling, num_draft_tokens, draft_greedily or sampling.greedy, verification)

    def go_on(*, num_left: int, num_tokens: float = math.inf) -> None:
        """Until at most so many are left, and so many tokens. What has ended leaves its trace alone."""
        while len(running) > num_left or (running and sum(walk.num_tokens for walk in running.values()) > num_tokens):
            for number in [number for number, walk in running.items() if not walk.remaining]:
                traces[number] = running.pop(number).trace
            if running:
                _step(drafter, list(running.values()), how)

    for number, conversation in enumerate(progress(conversations, "replay")):
        reason = refusal(conversation, conversation.loss_mask, sampling=sampling)
        if reason is not None:
            refused[reason] += 1
            continue
        go_on(num_left=TOGETHER - 1, num_tokens=TOGETHER_TOKENS - conversation.loss_mask.numel())
        running[number] = _Walk.start(
            store_get(conversation.key),
            conversation,
            sampling=sampling,
            target_head=target_head,
            eos_token_ids=eos_token_ids,
            generator=prompt_generator(seed, conversation.id, target_head.lm_head.device),
        )
    go_on(num_left=0)
    if not traces:
        raise ValueError(
            f"none of {len(conversations)} conversations can be replayed at {sampling}: {dict(refused)}; "
            "give conversations that the target answered at this sampling"
        )
    return ReplayResult(tuple(traces[number] for number in sorted(traces)), dict(refused))


@dataclass(frozen=True, slots=True)
class _How:
    sampling: Sampling
    num_draft_tokens: int
    draft_greedily: bool
    verification: Verification


@dataclass(slots=True)
class _Walk:
    """An answer while it is replayed."""

    conversation: TokenizedConversation
    answer: "_Answer"
    context: DraftContext
    generator: torch.Generator | None
    steps: list[VerifyStep] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        sample: TargetSample,
        conversation: TokenizedConversation,
        *,
        sampling: Sampling,
        target_head: TargetHead,
        eos_token_ids: Collection[int],
        generator: torch.Generator | None,
    ) -> "_Walk":
        answer = _recorded_answer(sample, sampling=sampling, target_head=target_head, eos_token_ids=eos_token_ids)
        start = answer.start
        context = DraftContext.start(
            answer.token_ids[:start], answer.hidden_states[:start], int(answer.token_ids[start])
        )
        return cls(conversation, answer, context, generator)

    @property
    def num_tokens(self) -> int:
        return len(self.answer.token_ids)

    @property
    def remaining(self) -> int:
        """Recorded tokens after the anchor."""
        return self.num_tokens - 1 - self.context.position

    @property
    def trace(self) -> Trace:
        written = tuple(self.answer.token_ids[self.answer.start :].tolist())
        return Trace(self.conversation.id, self.conversation.domain, tuple(self.steps), len(written), written)

    def take(self, proposal: Proposal, how: _How) -> None:
        """Keep of the proposal what decoding would have, and go on behind the token after it."""
        position, token_ids = self.context.position, self.answer.token_ids
        if how.draft_greedily:
            kept = _matches(proposal, self.answer, position)
        else:
            kept = _kept(proposal, self.answer, position, how.verification, self.generator)
        # What follows the recorded tokens was cut away in decoding too.
        emitted = min(int(kept.long().cumprod(0).sum()) + 1, self.remaining)
        self.steps.append(VerifyStep.of(position, proposal, num_verified=kept.numel(), num_accepted=emitted - 1))
        known = slice(position, position + emitted)
        self.context.advance(token_ids[known], self.answer.hidden_states[known], int(token_ids[position + emitted]))


def _step(drafter: Proposer, walks: Sequence[_Walk], how: _How) -> None:
    forced = None
    if not how.draft_greedily:
        width = max(how.num_draft_tokens, 0)  # the drafter says what is wrong with a negative number
        forced = torch.stack([walk.answer.following(walk.context.position, width) for walk in walks])
    proposal = drafter.propose(
        [walk.context for walk in walks],
        num_draft_tokens=how.num_draft_tokens,
        sampling=GREEDY if how.draft_greedily else how.sampling,
        forced_token_ids=forced,
    )
    for row, walk in enumerate(walks):
        walk.take(proposal[row], how)


def refusal(conversation: TokenizedConversation, loss_mask: Tensor, *, sampling: Sampling) -> str | None:
    """Why the last answer, as marked by ``loss_mask`` [T], cannot be replayed at ``sampling``; None if it can."""
    if conversation.sampling is None:
        return "no sampling recorded"
    if not conversation.sampling.same_distribution(sampling):
        return "recorded at another sampling"
    if not loss_mask.any():
        return "no answer"
    if answer_span(loss_mask)[0] == 0:
        return "no prompt before the answer"
    return None


def answer_span(loss_mask: Tensor) -> tuple[int, int]:
    """[start, end) of the last contiguous run of True in ``loss_mask`` [T]; there is at least one."""
    end = int(loss_mask.nonzero()[-1]) + 1
    gaps = (~loss_mask[:end]).nonzero()
    return (int(gaps[-1]) + 1 if gaps.numel() else 0), end


@dataclass(frozen=True, slots=True)
class _Answer:
    """Prompt and answer on the device, ending with the answer's last token.

    ``token_ids`` [T], ``hidden_states`` [T, L, H], the answer from ``start`` on; ``probabilities`` fp32 [T]: p of the
    token *after* t given those up to t (unread before ``start`` and at the end); None for a greedy answer.
    """

    token_ids: Tensor
    hidden_states: Tensor
    start: int
    probabilities: Tensor | None

    def following(self, position: int, num_tokens: int) -> Tensor:
        """The recorded tokens after ``position``, [num_tokens]; past the end the last one again."""
        indices = torch.arange(position + 1, position + 1 + num_tokens, device=self.token_ids.device)
        return self.token_ids[indices.clamp_max(len(self.token_ids) - 1)]


def _recorded_answer(
    sample: TargetSample, *, sampling: Sampling, target_head: TargetHead, eos_token_ids: Collection[int]
) -> _Answer:
    device = target_head.lm_head.device
    start, end = answer_span(sample.loss_mask)
    new_tokens = cut(
        sample.token_ids[start:end].tolist(), max_tokens=sampling.max_new_tokens, eos_token_ids=eos_token_ids
    )
    end = start + len(new_tokens)
    return _Answer(
        token_ids=sample.token_ids[:end].to(device),
        hidden_states=sample.hidden_states[:end].to(device),
        start=start,
        probabilities=None
        if sampling.greedy
        else _next_token_probabilities(sample, start, end, sampling=sampling, target_head=target_head),
    )


def _next_token_probabilities(
    sample: TargetSample, start: int, end: int, *, sampling: Sampling, target_head: TargetHead
) -> Tensor:
    """p of each answer token but the first under the target's distribution, at the place of the token before it."""
    head = target_head.lm_head
    token_ids = sample.token_ids[:end].to(head.device)
    recorded = torch.zeros(end, device=head.device)
    for first in range(start, end - 1, CHUNK_TOKENS):
        last = min(first + CHUNK_TOKENS, end - 1)
        p = probabilities(target_head.logits(sample.last_hidden_state[first:last].to(head)), sampling)
        recorded[first:last] = p.gather(-1, token_ids[first + 1 : last + 1, None]).squeeze(-1)
    return recorded


def _matches(proposal: Proposal, answer: _Answer, position: int) -> Tensor:
    """bool [K]: argmax drafts stand where they are the recorded tokens."""
    return proposal.token_ids == answer.following(position, proposal.token_ids.numel())


def keeping(p: Tensor, q: Tensor, *, verification: Verification) -> Tensor:
    """Of recorded tokens with probabilities p and q [K], that each is kept given those before it: min(1, this).

    Infinite where p is zero, which only rounding brings about.
    """
    weights = 1.0 if verification == "token" else running_weights(p / q.clamp_min(SMALLEST_Q))[..., :-1]
    return q / (weights * p)


def _kept(
    proposal: Proposal, answer: _Answer, position: int, verification: Verification, generator: torch.Generator | None
) -> Tensor:
    """bool [K]: whether each recorded token is kept, given that those before it were."""
    num_slots = proposal.token_ids.numel()
    recorded = answer.following(position, num_slots)
    assert torch.equal(proposal.token_ids, recorded), "the drafter did not follow the forced tokens"
    if proposal.probabilities is None:
        raise ValueError("the drafter offers no probabilities for drawn drafts; replay it with draft_greedily=True")
    assert answer.probabilities is not None
    q = proposal.probabilities.float().gather(-1, recorded[:, None]).squeeze(-1)
    slots = torch.arange(position, position + num_slots, device=q.device).clamp_max(len(answer.token_ids) - 1)
    uniform = torch.rand(num_slots, generator=generator, device=q.device)
    return uniform < keeping(answer.probabilities[slots], q, verification=verification)
