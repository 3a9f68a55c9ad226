"""What is evaluated and how: typed recipes that the pipeline carries out."""

from typing import Literal

from dspark_lab.data.prompts import PromptSource
from dspark_lab.records import Sampling
from dspark_lab.validation import checked

Mode = Literal["replay", "decode"]


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
        temperature: float,
        top_k: int,
        top_p: float,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        self.modes: tuple[Mode, ...] = (mode,) if isinstance(mode, str) else mode
        if not self.modes:
            raise ValueError("mode is empty: choose replay, decode or [replay, decode]")
        self.checkpoint = checkpoint
        self.num_draft_tokens = num_draft_tokens
        self.num_replay_prompts, self.num_decode_prompts = num_replay_prompts, num_decode_prompts
        self.sampling = Sampling(temperature, top_k, top_p, max_new_tokens)
        self.seed = seed
