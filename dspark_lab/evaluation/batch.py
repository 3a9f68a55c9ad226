"""Real decoding of several prompts together under a scheduler, beside plain decoding of the same batches."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark_lab.decoding.batch import BatchVerifier, decode_batch
from dspark_lab.decoding.loop import Proposer
from dspark_lab.decoding.sampling import prompt_generator
from dspark_lab.decoding.verification import Verification
from dspark_lab.evaluation.decode import Progress, silent
from dspark_lab.records import Sampling, TokenizedConversation, VerifyStep
from dspark_lab.scheduler.fixed import NoDrafts
from dspark_lab.scheduler.protocol import VerifyScheduler


@dataclass(frozen=True, slots=True)
class Way:
    """``scheduler`` is made anew for each batch: some remember what they saw. ``drafter`` None: plain decoding."""

    name: str
    drafter: Proposer | None
    scheduler: Callable[[], VerifyScheduler]


PLAIN = Way("plain", None, NoDrafts)


@dataclass(slots=True)
class BatchResult:
    """Of one way at one batch size. ``seconds`` of each round, prefill included; all else of the last round."""

    num_tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    token_ids: list[tuple[int, ...]] = field(default_factory=list)
    steps: list[VerifyStep] = field(default_factory=list)

    @property
    def rates(self) -> np.ndarray:
        """Tokens/s of each round."""
        return self.num_tokens / np.array(self.seconds)

    @property
    def acceptance_length(self) -> float:
        """Tokens a verify step of one request yields, its bonus token included; 1 without drafts."""
        return 1 + float(np.mean([step.num_accepted for step in self.steps])) if self.steps else 1.0

    @property
    def num_verified(self) -> float:
        """Draft tokens verified a step of one request."""
        return float(np.mean([step.num_draft_tokens for step in self.steps])) if self.steps else 0.0


def evaluate_batches(
    make_verifier: Callable[[], BatchVerifier],
    ways: Sequence[Way],
    prompts: Sequence[TokenizedConversation],
    *,
    batch_size: int,
    eos_token_ids: Collection[int],
    sampling: Sampling,
    num_draft_tokens: int,
    seed: int,
    verification: Verification = "token",
    num_rounds: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = silent,
) -> dict[str, BatchResult]:
    """All prompts in batches of ``batch_size``, by every way in turn, in every other round in the opposite order.

    ``make_verifier`` gives an empty cache. The ``token_ids`` of ``prompts``, on its device, are fed whole. Random numbers
    of a batch depend on ``seed`` and its first prompt. ``clock``: seconds; ``time.process_time`` where other programs
    share the machine.
    """
    if not prompts:
        raise ValueError("prompts: there is none to decode; give at least one")
    groups = [prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    found = {way.name: BatchResult() for way in ways}
    turns = [way for number in range(num_rounds) for way in (ways if number % 2 == 0 else ways[::-1])]
    for way in progress(turns, f"decode {batch_size} together"):
        started, texts, steps = clock(), [], []
        for group in groups:
            decoded = decode_batch(
                make_verifier(),
                way.drafter,
                [prompt.token_ids for prompt in group],
                scheduler=way.scheduler(),
                sampling=sampling,
                num_draft_tokens=0 if way.drafter is None else num_draft_tokens,
                eos_token_ids=eos_token_ids,
                verification=verification,
                generator=prompt_generator(seed, group[0].id, group[0].token_ids.device),
            )
            texts += [each.token_ids for each in decoded]
            steps += [step for each in decoded for step in each.steps]
        result = found[way.name]
        result.seconds.append(clock() - started)
        result.num_tokens, result.token_ids, result.steps = sum(map(len, texts)), texts, steps
    return found
