"""What a drafter learns from: prompt sources by split, who answers them and how, and how the answers become rows."""

from dataclasses import replace
from typing import Literal

from pydantic import PositiveInt

from dspark_lab.data.answers import SamplingMix
from dspark_lab.data.prompts import PromptSource, to_prompt
from dspark_lab.data.screening import OnOverlap, OnTruncated
from dspark_lab.records import Conversation, Sampling
from dspark_lab.validation import checked


class Corpus:
    """The data recipe.

    With ``regenerate`` the target answers the prompts: training prompts ``samples_per_prompt`` times with ``samplings``
    in turn, validation prompts once and greedily, so that they can be replayed. An assistant's turn at the end is cut
    off before. Without, the conversations end with assistant turns of their own.
    ``truncated`` says what becomes of training answers that were cut at ``max_new_tokens``; empty ones are always
    dropped. ``overlap`` says what becomes of training conversations that share 13 words in a row with a prompt of the
    benchmark. ``packaged_answers`` names answers shipped with this package, used where this very target wrote them;
    ``num_checked`` of the greedy ones are written again and compared. Training and validation answers are not supervised
    through the text ``reasoning_end``, where they hold it; samples with fewer than ``min_supervised_tokens`` are left out.
    ``source`` says whether training reads states from the store or an engine captures them meanwhile; the pipeline settles
    None.
    """

    @checked
    def __init__(
        self,
        *,
        train: PromptSource,
        validation: PromptSource,
        regenerate: bool,
        samplings: tuple[Sampling, ...],
        samples_per_prompt: int,
        max_new_tokens: int,
        truncated: OnTruncated,
        overlap: OnOverlap,
        packaged_answers: str | None,
        num_checked: int,
        enable_thinking: bool | None,
        reasoning_end: str | None,
        draft_vocab_size: int | None,
        min_supervised_tokens: PositiveInt,
        source: Literal["stored", "live"] | None,
        row_tokens: int,
        rows_per_batch: int,
        num_workers: int | None,
        prefetch_factor: int,
    ) -> None:
        if regenerate and not samplings:
            raise ValueError("samplings is empty but regenerate is true: give at least one, e.g. [{temperature: 0.0}]")
        if not regenerate and packaged_answers is not None:
            raise ValueError(
                f"packaged_answers={packaged_answers!r} has no effect with regenerate=false: set it to null"
            )
        if not regenerate and samples_per_prompt != 1:
            raise ValueError(
                f"samples_per_prompt={samples_per_prompt} has no effect with regenerate=false: set it to 1"
            )
        if not regenerate and truncated == "drop":
            raise ValueError("truncated='drop' has no effect with regenerate=false: set it to keep")
        if reasoning_end == "":
            raise ValueError("reasoning_end='' ends nothing: give the text that ends a thought, or null")
        self.train, self.validation = train, validation
        self.regenerate = regenerate
        limited = tuple(replace(sampling, max_new_tokens=max_new_tokens) for sampling in samplings)
        self.mix = SamplingMix(samplings=limited, samples_per_prompt=samples_per_prompt) if regenerate else None
        self.greedy = Sampling(max_new_tokens=max_new_tokens)
        self.truncated: OnTruncated = truncated
        self.overlap: OnOverlap = overlap
        self.packaged_answers, self.num_checked = packaged_answers, num_checked
        self.enable_thinking, self.reasoning_end = enable_thinking, reasoning_end
        self.draft_vocab_size = draft_vocab_size
        self.min_supervised_tokens = min_supervised_tokens
        self.source = source
        self.row_tokens, self.rows_per_batch = row_tokens, rows_per_batch
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor

    def read(self, source: PromptSource) -> list[Conversation]:
        """The conversations of ``source``, cut to their prompts where the target is to answer them."""
        return [to_prompt(conversation) if self.regenerate else conversation for conversation in source]
