"""Reasoning that a drafter reads and does not learn."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from dspark_lab.records import TokenizedConversation


def supervise_answers_alone(
    samples: Iterable[TokenizedConversation], end_of_reasoning: Sequence[int]
) -> list[TokenizedConversation]:
    """Take each turn's tokens through the first ``end_of_reasoning`` (ids) out of its supervision.

    A turn is a run of supervised tokens; one without those ids is supervised as before.
    """
    assert end_of_reasoning
    return [replace(sample, loss_mask=_answers_of(sample, tuple(end_of_reasoning))) for sample in samples]


def _answers_of(sample: TokenizedConversation, end: tuple[int, ...]) -> torch.Tensor:
    mask = sample.loss_mask.clone()
    edges = torch.diff(mask.int(), prepend=torch.zeros(1, dtype=torch.int32), append=torch.zeros(1, dtype=torch.int32))
    for start, stop in zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist(), strict=True):
        ids = tuple(sample.token_ids[start:stop].tolist())
        places = (index for index in range(len(ids) - len(end) + 1) if ids[index : index + len(end)] == end)
        found = next(places, None)
        if found is not None:
            mask[start : start + found + len(end)] = False
    return mask
