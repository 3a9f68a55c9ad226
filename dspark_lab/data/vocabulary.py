"""Draft vocabulary: the target tokens that a drafter can propose (algorithms.md 2.3)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_lab.records import TokenizedConversation


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """Draft id j stands for target id ``draft_to_target[j]``, ascending: rows of the target's head keep their order."""

    draft_to_target: Tensor  # int64 [V_d], ascending
    target_to_draft: Tensor  # int64 [V]; -1 outside the draft vocabulary

    @classmethod
    def of(cls, target_ids: Tensor, *, vocab_size: int) -> "DraftVocabulary":
        """From ascending distinct target ids [V_d]; ValueError otherwise."""
        target_ids = target_ids.to(torch.int64)
        if target_ids.numel() == 0 or bool((target_ids.diff() <= 0).any()):
            raise ValueError("target_ids: a draft vocabulary is a non-empty ascending list of distinct target ids")
        if int(target_ids[0]) < 0 or int(target_ids[-1]) >= vocab_size:
            raise ValueError(
                f"target_ids: {int(target_ids[0])}..{int(target_ids[-1])} leave the target's vocabulary of "
                f"{vocab_size}; was it built for another target?"
            )
        target_to_draft = torch.full((vocab_size,), -1, dtype=torch.int64)
        target_to_draft[target_ids] = torch.arange(target_ids.numel())
        return cls(target_ids, target_to_draft)

    @classmethod
    def full(cls, vocab_size: int) -> "DraftVocabulary":
        """The target's own vocabulary: the identity."""
        return cls.of(torch.arange(vocab_size), vocab_size=vocab_size)

    @property
    def size(self) -> int:
        """V_d."""
        return int(self.draft_to_target.numel())

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.target_to_draft.numel())

    @property
    def is_full(self) -> bool:
        """Whether draft ids are target ids; a checkpoint then carries neither ``t2d`` nor ``d2t``."""
        return self.size == self.vocab_size

    @property
    def t2d(self) -> Tensor:
        """bool [V]: whether the target id is in the draft vocabulary (speculators' buffer)."""
        return self.target_to_draft >= 0

    @property
    def d2t(self) -> Tensor:
        """int64 [V_d] of *offsets*: target id = draft id + d2t[draft id] (speculators' buffer)."""
        return self.draft_to_target - torch.arange(self.size, device=self.draft_to_target.device)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """[...] draft ids -> [...] target ids."""
        return self.draft_to_target[draft_ids]

    def to_draft(self, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[...] target ids -> ([...] draft ids, [...] bool in vocabulary); ids outside map to draft id 0."""
        draft_ids = self.target_to_draft[target_ids]
        return draft_ids.clamp(min=0), draft_ids >= 0

    def coverage(self, token_counts: Tensor) -> float:
        """Share of the counted tokens [V] that the draft vocabulary contains; 0 when nothing was counted."""
        total = int(token_counts.sum())
        return int(token_counts[self.draft_to_target].sum()) / total if total else 0.0

    def to(self, device: torch.device | str) -> "DraftVocabulary":
        return DraftVocabulary(self.draft_to_target.to(device), self.target_to_draft.to(device))


def count_supervised_tokens(conversations: Iterable[TokenizedConversation], *, vocab_size: int) -> Tensor:
    """int64 [V]: how often each target token is supervised. ValueError names a conversation with an id outside."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for conversation in conversations:
        token_ids = conversation.token_ids[conversation.loss_mask]
        if token_ids.numel() and int(token_ids.max()) >= vocab_size:
            raise ValueError(
                f"conversation {conversation.id!r} has token {int(token_ids.max())}, outside the target's vocabulary "
                f"of {vocab_size}; was it tokenised for another target?"
            )
        counts.index_add_(0, token_ids, torch.ones_like(token_ids))
    return counts


def build_draft_vocabulary(token_counts: Tensor, *, vocab_size: int, draft_vocab_size: int | None) -> DraftVocabulary:
    """The ``draft_vocab_size`` most frequent tokens; ties, and what is left to fill, go to the smallest ids.

    ``token_counts``: int64 [V] (``count_supervised_tokens``). None, V and more give the full vocabulary. EOS needs no
    special case: every supervised answer that stopped by itself ends with it. Source: algorithms.md 2.3.
    """
    if token_counts.shape != (vocab_size,):
        raise ValueError(
            f"token_counts has shape {tuple(token_counts.shape)}; expected one count per target token, [{vocab_size}]"
        )
    if draft_vocab_size is not None and draft_vocab_size < 1:
        raise ValueError(
            f"draft_vocab_size={draft_vocab_size}: must be at least 1, or null for all of the target's vocabulary"
        )
    size = bounded_size(draft_vocab_size, vocab_size=vocab_size)
    if size == vocab_size:
        return DraftVocabulary.full(vocab_size)
    # A stable descending sort keeps ids ascending among equal counts, the zero counts that fill up included.
    most_frequent = torch.argsort(token_counts, descending=True, stable=True)[:size]
    return DraftVocabulary.of(most_frequent.sort().values, vocab_size=vocab_size)


def bounded_size(draft_vocab_size: int | None, *, vocab_size: int) -> int:
    """Of a draft vocabulary with at most so many of the target's tokens; None: with all."""
    return min(draft_vocab_size or vocab_size, vocab_size)
