"""Contamination: word 13-grams that training text shares with evaluation prompts.

Words, not token ids: lower-case runs of letters and digits do not depend on the target's tokenizer or chat template, so
the number compares across targets and with published ones, and a changed space or comma does not hide a copy.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from dspark_lab.records import Conversation

NUM_WORDS = 13
"""As in Brown et al. 2020 (GPT-3), appendix C."""


def words(text: str) -> list[str]:
    """Lower-case runs of letters and digits, of any script."""
    return re.findall(r"[^\W_]+", text.lower())


def overlapping(
    texts: Iterable[Sequence[str]], references: Iterable[Sequence[str]], *, num_words: int = NUM_WORDS
) -> list[bool]:
    """For each text (as words) whether ``num_words`` of its words in a row stand in a reference too.

    A text or reference with fewer words has no such run: equal short prompts are ``disjoint``'s to find.
    """
    known = {gram for reference in references for gram in _grams(reference, num_words)}
    return [any(gram in known for gram in _grams(text, num_words)) for text in texts]


def prompt_words(conversation: Conversation) -> list[str]:
    """What was asked: all messages but the system's, which many prompts share, and the assistant's."""
    return words("\n".join(m["content"] for m in conversation.messages if m["role"] not in ("system", "assistant")))


def answer_words(conversation: Conversation) -> list[str]:
    """What the assistant says in the messages; a regenerated answer is ids, and the caller's to decode."""
    return words("\n".join(m["content"] for m in conversation.messages if m["role"] == "assistant"))


def _grams(sequence: Sequence[str], num_words: int) -> Iterator[tuple[str, ...]]:
    return (tuple(sequence[start : start + num_words]) for start in range(len(sequence) - num_words + 1))
