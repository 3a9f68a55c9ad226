"""Evaluation by real speculative decoding, batch 1: traces, speed against plain decoding, agreement of greedy text."""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark_lab.decoding.loop import Decoded, Proposer, plain_decode, speculative_decode
from dspark_lab.decoding.sampling import prompt_generator
from dspark_lab.decoding.verification import Verification
from dspark_lab.records import Sampling, TokenizedConversation, Trace
from dspark_lab.target.protocol import Target

TIMING_FILE = "timing.json"

Progress = Callable[[Iterable[Any], str], Iterable[Any]]
"""Wraps an iterable under a description, as a progress bar does."""


def silent(items: Iterable[Any], description: str) -> Iterable[Any]:
    """No progress bar."""
    return items


@dataclass(frozen=True, slots=True)
class PromptTiming:
    """Seconds and new tokens of one prompt, prefill included, both ways."""

    prompt_id: str
    speculative_s: float
    speculative_tokens: int
    plain_s: float
    plain_tokens: int

    @property
    def speedup(self) -> float:
        return (self.speculative_tokens / self.speculative_s) / (self.plain_tokens / self.plain_s)


@dataclass(frozen=True, slots=True)
class Timing:
    """Speed of this Python loop ("loop", never a server's), over all timed prompts; prefill included, at least one."""

    prompts: tuple[PromptTiming, ...]

    @property
    def speculative_tokens_per_s(self) -> float:
        return sum(p.speculative_tokens for p in self.prompts) / sum(p.speculative_s for p in self.prompts)

    @property
    def plain_tokens_per_s(self) -> float:
        return sum(p.plain_tokens for p in self.prompts) / sum(p.plain_s for p in self.prompts)

    @property
    def speedup(self) -> float:
        """Ratio of the totals."""
        return self.speculative_tokens_per_s / self.plain_tokens_per_s

    @property
    def speeds(self) -> dict[str, float]:
        """By the vocabulary's names."""
        return {
            "loop_tokens_per_s": self.speculative_tokens_per_s,
            "loop_plain_tokens_per_s": self.plain_tokens_per_s,
            "loop_speedup": self.speedup,
        }

    @property
    def median_speedup(self) -> float:
        """Median over prompts of each one's ratio: a stall of the machine moves it little."""
        return statistics.median(p.speedup for p in self.prompts)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A prompt whose greedy speculative text leaves the plain one; ``position`` counts new tokens from 0."""

    prompt_id: str
    position: int


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """``timing`` is None with fewer than two prompts (the first warms up); ``mismatches`` is None unless greedy.

    ``plain_token_ids``: what plain decoding wrote for each prompt.
    """

    traces: tuple[Trace, ...]
    timing: Timing | None
    mismatches: tuple[Mismatch, ...] | None
    plain_token_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def mismatch_rate(self) -> float | None:
        """Share of prompts whose speculative greedy text differs from the plain one; in fp32 only at exact ties."""
        return None if self.mismatches is None else len(self.mismatches) / len(self.traces)


def evaluate_decode(
    target: Target,
    drafter: Proposer,
    prompts: Sequence[TokenizedConversation],
    *,
    sampling: Sampling,
    num_draft_tokens: int,
    seed: int,
    draft_greedily: bool = False,
    verification: Verification = "token",
    progress: Progress = silent,
) -> DecodeResult:
    """Decode every prompt speculatively and plainly, alternately, with one target in one run.

    The ``token_ids`` of ``prompts`` are fed whole: they end where the answer begins. Random numbers depend on ``seed``
    and the prompt's id only. The first prompt is decoded and traced but not timed.
    """
    if not prompts:
        raise ValueError("prompts: there is none to decode; give at least one (two, to measure speed)")
    device = target.head().lm_head.device

    def speculative(prompt: TokenizedConversation) -> Decoded:
        return speculative_decode(
            target.verifier(),
            drafter,
            prompt.token_ids.to(device),
            sampling=sampling,
            num_draft_tokens=num_draft_tokens,
            eos_token_ids=target.spec.eos_token_ids,
            generator=prompt_generator(seed, prompt.id, device),
            draft_greedily=draft_greedily,
            verification=verification,
        )

    def plain(prompt: TokenizedConversation) -> Decoded:
        return plain_decode(
            target.verifier(),
            prompt.token_ids.to(device),
            sampling=sampling,
            eos_token_ids=target.spec.eos_token_ids,
            generator=prompt_generator(seed, prompt.id, device),
        )

    traces, timings, mismatches, texts = [], [], [], []
    for index, prompt in enumerate(progress(prompts, "decode")):
        # Each goes first every other time: neither is always the one that finds warm caches.
        if index % 2 == 0:
            ours, ours_s = _timed(speculative, prompt)
            own, own_s = _timed(plain, prompt)
        else:
            own, own_s = _timed(plain, prompt)
            ours, ours_s = _timed(speculative, prompt)
        traces.append(Trace(prompt.id, prompt.domain, ours.steps, len(ours.token_ids), ours.token_ids))
        texts.append(own.token_ids)
        if index > 0:
            timings.append(PromptTiming(prompt.id, ours_s, len(ours.token_ids), own_s, len(own.token_ids)))
        if ours.token_ids != own.token_ids:
            mismatches.append(Mismatch(prompt.id, first_difference(ours.token_ids, own.token_ids)))
    return DecodeResult(
        traces=tuple(traces),
        timing=Timing(tuple(timings)) if timings else None,
        mismatches=tuple(mismatches) if sampling.greedy else None,
        plain_token_ids=tuple(texts),
    )


def save_timing(folder: Path, timing: Timing | None) -> None:
    """``timing.json`` beside the traces; an earlier one goes where nothing was timed."""
    if timing is None:
        (folder / TIMING_FILE).unlink(missing_ok=True)
    else:
        text = json.dumps([asdict(prompt) for prompt in timing.prompts], indent=1)
        (folder / TIMING_FILE).write_text(text + "\n", encoding="utf-8")


def read_timing(folder: Path) -> Timing | None:
    path = folder / TIMING_FILE
    if not path.exists():
        return None
    return Timing(tuple(PromptTiming(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))))


def prompt_only(conversation: TokenizedConversation) -> TokenizedConversation:
    """Everything before the first supervised token."""
    start = int(conversation.loss_mask.nonzero()[0])
    return TokenizedConversation(
        conversation.id, conversation.token_ids[:start], conversation.loss_mask[:start], conversation.domain
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter one's length when it is a prefix of the other."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def _timed(decode: Callable[[TokenizedConversation], Decoded], prompt: TokenizedConversation) -> tuple[Decoded, float]:
    """Its result and seconds. A device needs no synchronising: every step ends by reading its tokens on the host."""
    start = time.perf_counter()
    decoded = decode(prompt)
    return decoded, time.perf_counter() - start
