"""What a drafter learns from: prompt sources by split, who answers them and how, and how the answers become rows."""

from dataclasses import replace

from dspark_lab.data.answers import SamplingMix
from dspark_lab.data.prompts import PromptSource
from dspark_lab.records import Sampling
from dspark_lab.validation import checked


class Corpus:
    """The data recipe.

    With ``regenerate`` the target answers the prompts: training prompts with ``samplings`` in turn, validation prompts
    greedily, so that they can be replayed. Without, the conversations end with assistant turns of their own.
    ``packaged_answers`` names answers shipped with this package, used where this very target wrote them;
    ``num_checked`` of the greedy ones are written again and compared.
    """

    @checked
    def __init__(
        self,
        *,
        train: PromptSource,
        validation: PromptSource,
        regenerate: bool,
        samplings: tuple[Sampling, ...],
        max_new_tokens: int,
        packaged_answers: str | None,
        num_checked: int,
        enable_thinking: bool | None,
        draft_vocab_size: int | None,
        row_tokens: int,
        rows_per_batch: int,
        num_workers: int,
        prefetch_factor: int,
    ) -> None:
        if regenerate and not samplings:
            raise ValueError("samplings is empty but regenerate is true: give at least one, e.g. [{temperature: 0.0}]")
        if not regenerate and packaged_answers is not None:
            raise ValueError(
                f"packaged_answers={packaged_answers!r} has no effect with regenerate=false: set it to null"
            )
        self.train, self.validation = train, validation
        self.regenerate = regenerate
        limited = tuple(replace(sampling, max_new_tokens=max_new_tokens) for sampling in samplings)
        self.mix = SamplingMix(samplings=limited) if regenerate else None
        self.greedy = Sampling(max_new_tokens=max_new_tokens)
        self.packaged_answers, self.num_checked = packaged_answers, num_checked
        self.enable_thinking = enable_thinking
        self.draft_vocab_size = draft_vocab_size
        self.row_tokens, self.rows_per_batch = row_tokens, rows_per_batch
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
