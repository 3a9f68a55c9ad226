"""What is evaluated and how: typed recipes that the pipeline carries out."""

from typing import Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from dspark_lab.data.prompts import PromptSource
from dspark_lab.decoding.verification import Verification
from dspark_lab.records import Sampling
from dspark_lab.validation import checked

Mode = Literal["replay", "decode", "batch"]


class Benchmark:
    """A named set of prompts that no drafter is trained on."""

    @checked
    def __init__(self, *, name: str, prompts: PromptSource) -> None:
        self.name, self.prompts = name, prompts


class Evaluation:
    """How a trained drafter is measured. ``num_draft_tokens`` None: as many as it drafts."""

    @checked
    def __init__(
        self,
        *,
        mode: Mode | tuple[Mode, ...],
        checkpoint: Literal["best", "last"],
        num_draft_tokens: int | None,
        num_replay_prompts: int,
        num_decode_prompts: int,
        batch_sizes: tuple[PositiveInt, ...],
        num_batch_prompts: PositiveInt,
        num_batch_rounds: PositiveInt,
        temperature: float,
        top_k: int,
        top_p: float,
        max_new_tokens: int,
        verification: Verification,
        seed: int,
        num_examples: NonNegativeInt,
    ) -> None:
        self.modes: tuple[Mode, ...] = (mode,) if isinstance(mode, str) else mode
        if not self.modes:
            raise ValueError("mode is empty: choose replay, decode, batch or several, e.g. [replay, decode]")
        if not batch_sizes:
            raise ValueError("batch_sizes is empty: say how many requests are decoded together, e.g. [1,4,16]")
        self.checkpoint = checkpoint
        self.num_draft_tokens = num_draft_tokens
        self.num_replay_prompts, self.num_decode_prompts = num_replay_prompts, num_decode_prompts
        self.batch_sizes = batch_sizes
        self.num_batch_prompts, self.num_batch_rounds = num_batch_prompts, num_batch_rounds
        self.sampling = Sampling(temperature, top_k, top_p, max_new_tokens)
        self.verification: Verification = verification
        _refuse_greedy_blocks(verification, self.sampling)
        self.seed, self.num_examples = seed, num_examples


def _refuse_greedy_blocks(verification: Verification, sampling: Sampling) -> None:
    if verification == "block" and sampling.greedy:
        raise ValueError(
            "verification=block with temperature=0.0: greedy verification knows no blocks; set a temperature or leave "
            "verification=token"
        )


class Calibration:
    """How confidences are calibrated from traces, and on which of them. The grid of temperatures is log-spaced."""

    @checked
    def __init__(
        self,
        *,
        origin: Literal["measured", "replayed"],
        fit_share: float,
        lowest_temperature: PositiveFloat,
        highest_temperature: PositiveFloat,
        num_temperatures: PositiveInt,
        num_bins: PositiveInt,
        min_rounds: PositiveInt,
        seed: int,
    ) -> None:
        if not 0 < fit_share < 1:
            raise ValueError(f"fit_share={fit_share}: give both parts something, e.g. 0.5")
        if lowest_temperature > highest_temperature:
            raise ValueError(
                f"lowest_temperature={lowest_temperature} > highest_temperature={highest_temperature}: exchange them"
            )
        self.origin: Literal["measured", "replayed"] = origin
        self.fit_share = fit_share
        self.grid = np.geomspace(lowest_temperature, highest_temperature, num_temperatures)
        self.num_bins, self.min_rounds, self.seed = num_bins, min_rounds, seed


NumDraftTokens = NonNegativeInt | Literal["adaptive"]
"""Of a served frontier. 0: no drafter. adaptive: the engine chooses, step by step, how many of its drafts it verifies."""


class Serving:
    """How the export is served and compared. Nulls: this Python, the target's precision here, as many as it drafts.

    ``num_draft_tokens`` and ``concurrency``: one value, or several whose combinations are all measured. The verdict is of
    the most draft tokens and the first concurrency. ``arguments`` are further ones of vLLM's ``api_server``;
    ``command_prefix`` is put before the command. ``endpoint``: URL of a server that runs already.
    """

    @checked
    def __init__(
        self,
        *,
        endpoint: str | None,
        python: str | None,
        command_prefix: tuple[str, ...],
        arguments: tuple[str, ...],
        dtype: Literal["float32", "bfloat16", "float16"] | None,
        num_prompts: int,
        temperature: float,
        top_k: int,
        top_p: float,
        max_new_tokens: int,
        verification: Verification,
        num_draft_tokens: NumDraftTokens | tuple[NumDraftTokens, ...] | None,
        concurrency: PositiveInt | tuple[PositiveInt, ...],
        deadline_s: float,
    ) -> None:
        if num_prompts < 2:
            raise ValueError(f"num_prompts={num_prompts}: an interval needs at least 2")
        several = num_draft_tokens if isinstance(num_draft_tokens, tuple) else (num_draft_tokens,)
        self.concurrency = concurrency if isinstance(concurrency, tuple) else (concurrency,)
        if not several or not self.concurrency:
            raise ValueError("num_draft_tokens and concurrency: give at least one value of each")
        numbers = [number for number in several if isinstance(number, int)]
        self.judged = max(numbers, default=None)
        if several != (None,) and not self.judged:
            raise ValueError(f"num_draft_tokens={list(several)}: the verdict needs a number above 0; add one")
        self.others: tuple[NumDraftTokens, ...] = tuple(
            number for number in dict.fromkeys(several) if number not in (None, self.judged)
        )
        given = {"python": python, "command_prefix": command_prefix, "arguments": arguments, "others": self.others}
        idle = ["num_draft_tokens" if name == "others" else name for name, value in given.items() if value]
        if endpoint and idle:
            raise ValueError(
                f"endpoint={endpoint} runs already, so {', '.join(idle)} would have no effect: leave out "
                + (
                    "all but one value of num_draft_tokens"
                    if idle == ["num_draft_tokens"]
                    else "what is said of a start"
                )
            )
        self.endpoint = endpoint
        self.python, self.command_prefix, self.arguments = python, command_prefix, arguments
        self.dtype = dtype
        self.num_prompts, self.deadline_s = num_prompts, deadline_s
        self.sampling = Sampling(temperature, top_k, top_p, max_new_tokens)
        self.verification: Verification = verification
        _refuse_greedy_blocks(verification, self.sampling)

    @property
    def draft_greedily(self) -> bool:
        """vLLM's default; drafts that are verified as blocks are drawn."""
        return self.verification == "token"

    def as_evaluated(self, evaluation: Evaluation) -> bool:
        """Whether a replay of ``evaluation`` is what the engine does."""
        if self.sampling != evaluation.sampling:
            return False
        return self.sampling.greedy or self.verification == evaluation.verification == "block"
