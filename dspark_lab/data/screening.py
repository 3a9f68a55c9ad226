"""Which training conversations are of no use, and why: empty or truncated answers, and copies of the evaluation set."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dspark_lab.data.overlap import answer_words, overlapping, prompt_words, words
from dspark_lab.data.prompts import Splits
from dspark_lab.records import Conversation

OnOverlap = Literal["report", "drop"]
OnTruncated = Literal["keep", "drop"]


@dataclass(frozen=True, slots=True)
class OverlapCount:
    """How many training texts share a run of words with an evaluation prompt, dropped or not."""

    num_overlapping: int
    num_compared: int

    @property
    def share(self) -> float:
        return self.num_overlapping / self.num_compared if self.num_compared else 0.0


@dataclass(frozen=True, slots=True)
class Screened:
    """``kept`` training conversations; ``dropped`` counts the others by reason."""

    kept: tuple[Conversation, ...]
    dropped: Mapping[str, int]
    overlap: OverlapCount


def screen_prompts(splits: Splits, *, overlap: OnOverlap) -> tuple[Splits, OverlapCount]:
    """The splits, without the training prompts that overlap with evaluation prompts if ``overlap`` is "drop"."""
    flags = overlapping(map(prompt_words, splits.train), map(prompt_words, splits.evaluation))
    count = OverlapCount(sum(flags), len(flags))
    if overlap == "report" or not count.num_overlapping:
        return splits, count
    kept = [index for index, flag in enumerate(flags) if not flag]
    screened = replace(
        splits,
        train=tuple(splits.train[index] for index in kept),
        train_positions=tuple(splits.train_positions[index] for index in kept),
        dropped={**splits.dropped, "train_prompt_overlaps_evaluation": count.num_overlapping},
    )
    return screened, count


def screen_answers(
    conversations: Sequence[Conversation],
    *,
    evaluation: Sequence[Conversation],
    truncated: OnTruncated,
    overlap: OnOverlap,
    end_token_ids: Collection[int],
    decode: Callable[[Sequence[int]], str],
) -> Screened:
    """Training conversations with an answer worth learning.

    Empty answers go; truncated ones and those that repeat an evaluation prompt as the settings say. ``decode`` turns a
    regenerated answer's ids into text.
    """
    texts = [
        words(decode(c.answer_token_ids)) if c.answer_token_ids is not None else answer_words(c) for c in conversations
    ]
    flags = overlapping(texts, map(prompt_words, evaluation))
    kept, dropped = [], Counter[str]()
    for conversation, overlaps in zip(conversations, flags, strict=True):
        if _is_empty(conversation, end_token_ids):
            dropped["answer_empty"] += 1
        elif truncated == "drop" and conversation.finish == "length":
            dropped["answer_truncated"] += 1
        elif overlap == "drop" and overlaps:
            dropped["answer_overlaps_evaluation"] += 1
        else:
            kept.append(conversation)
    return Screened(tuple(kept), dict(dropped), OverlapCount(sum(flags), len(flags)))


def _is_empty(conversation: Conversation, end_token_ids: Collection[int]) -> bool:
    if conversation.answer_token_ids is not None:
        return all(token in end_token_ids for token in conversation.answer_token_ids)
    last = conversation.messages[-1]
    return last["role"] == "assistant" and not (
        last["content"].strip() or last.get("tool_calls") or last.get("reasoning_content")
    )
