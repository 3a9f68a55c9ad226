"""Timing the steps of an in-process target, and the drafts of a drafter, on the machine at hand."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt

from dspark_lab.decoding.loop import GREEDY, Proposer
from dspark_lab.drafter.context import DraftContext
from dspark_lab.hardware.table import TimedDraft, TimedStep
from dspark_lab.target.huggingface import HuggingFaceTarget
from dspark_lab.validation import checked


class Grid:
    """The steps that are timed: every combination of requests, tokens of each and context of each.

    ``num_prefill_tokens`` are further numbers of tokens of a single request. Each step is done ``warmups`` times, then
    timed ``repeats`` times. ``endpoints``: servers that are timed instead (``hardware.engine``); how many tokens of a
    request they verify is theirs to say, so ``num_tokens`` does not matter there. ``num_gpus``: that do a step together.
    """

    @checked
    def __init__(
        self,
        *,
        num_requests: tuple[PositiveInt, ...],
        num_tokens: tuple[PositiveInt, ...],
        num_prefill_tokens: tuple[PositiveInt, ...],
        num_context_tokens: tuple[PositiveInt, ...],
        warmups: NonNegativeInt,
        repeats: PositiveInt,
        endpoints: tuple[str, ...],
        num_gpus: PositiveInt,
    ) -> None:
        if not (num_requests and num_tokens and num_context_tokens):
            raise ValueError("num_requests, num_tokens and num_context_tokens each need at least one number")
        self.num_requests, self.num_tokens, self.num_prefill_tokens = num_requests, num_tokens, num_prefill_tokens
        self.num_context_tokens, self.warmups, self.repeats = num_context_tokens, warmups, repeats
        self.endpoints, self.num_gpus = endpoints, num_gpus

    def tokens_of(self, num_requests: int) -> list[int]:
        """Tokens of each request, to be timed with so many requests."""
        return sorted({*self.num_tokens, *(self.num_prefill_tokens if num_requests == 1 else ())})

    def __len__(self) -> int:
        return len(self.num_context_tokens) * sum(len(self.tokens_of(number)) for number in self.num_requests)


@torch.inference_mode()
def measure_steps(target: HuggingFaceTarget, grid: Grid, *, seed: int) -> Iterator[TimedStep]:
    """Median and interquartile range of the target's cached forward, step shape by step shape.

    Every timed forward is taken out of the cache again, so the context stays what it says.
    """
    generator = torch.Generator().manual_seed(seed)
    spec, device = target.spec, target.device
    for context in grid.num_context_tokens:
        longest = context + max(grid.tokens_of(1))
        if longest > spec.max_position_embeddings:
            raise ValueError(
                f"num_context_tokens={context}: with the tokens of a step that is {longest}, and {spec.name} ends at "
                f"{spec.max_position_embeddings}"
            )
        for num_requests in grid.num_requests:
            cache = target.verifier().cache
            drawn = torch.randint(spec.vocab_size, (num_requests, longest), generator=generator).to(device)
            target.model(input_ids=drawn[:, :context], past_key_values=cache, use_cache=True)
            for num_tokens in grid.tokens_of(num_requests):
                fed = drawn[:, context : context + num_tokens]

                def step(fed: torch.Tensor = fed, cache=cache) -> None:
                    target.model(input_ids=fed, past_key_values=cache, use_cache=True)

                def restore(num_tokens: int = num_tokens, cache=cache) -> None:
                    cache.crop(-num_tokens)

                median, spread = _timed(step, restore, device=device, warmups=grid.warmups, repeats=grid.repeats)
                yield TimedStep(
                    num_requests=num_requests,
                    num_tokens=num_requests * num_tokens,
                    num_context_tokens=num_requests * context,
                    time_s=median,
                    iqr_s=spread,
                    repeats=grid.repeats,
                )


@torch.inference_mode()
def measure_drafts(
    target: HuggingFaceTarget, drafter: Proposer, grid: Grid, *, num_draft_tokens: int, seed: int
) -> Iterator[TimedDraft]:
    """Proposals for several requests in the middle of decoding: after the prompt was taken up, two new tokens a round."""
    generator = torch.Generator().manual_seed(seed)
    context_tokens = min(grid.num_context_tokens)
    token_ids = torch.randint(target.spec.vocab_size, (context_tokens,), generator=generator).to(target.device)
    states, anchor = target.verifier().forward(token_ids).hidden_states, int(token_ids[-1])
    for num_requests in grid.num_requests:
        contexts = [DraftContext.start(token_ids, states, anchor) for _ in range(num_requests)]

        def propose(contexts: list[DraftContext] = contexts) -> None:
            drafter.propose(contexts, num_draft_tokens=num_draft_tokens, sampling=GREEDY)

        def advance(contexts: list[DraftContext] = contexts) -> None:
            for context in contexts:
                context.advance(token_ids[-2:], states[-2:], anchor)

        median, spread = _timed(propose, advance, device=target.device, warmups=grid.warmups + 1, repeats=grid.repeats)
        yield TimedDraft(num_requests=num_requests, time_s=median, iqr_s=spread, repeats=grid.repeats)


def _timed(
    action: Callable[[], None], restore: Callable[[], None], *, device: torch.device, warmups: int, repeats: int
) -> tuple[float, float]:
    """(median, interquartile range) of the seconds of ``action``; ``restore`` follows each, untimed."""
    seconds = []
    for index in range(warmups + repeats):
        _synchronize(device)
        start = time.perf_counter()
        action()
        _synchronize(device)
        if index >= warmups:
            seconds.append(time.perf_counter() - start)
        restore()
    low, median, high = np.percentile(seconds, [25, 50, 75])
    return float(median), float(high - low)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
