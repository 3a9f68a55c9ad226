"""What a drafter may know of a sequence when it drafts, and how the sequences of a batch lie side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark_lab.drafter.layers import KeyValue


@dataclass(slots=True)
class DraftContext:
    """State of one sequence between two proposals.

    The *anchor* is the newest known token; its own states do not exist yet (the target computes them in the next verify).
    ``token_ids`` [n] and ``hidden_states`` [n, L, H] are the tokens before the anchor whose states arrived since the last
    proposal; ``propose`` consumes them into ``cache`` (the drafter's own, opaque to callers) and leaves them empty.
    ``position`` is the anchor's position = number of tokens whose states are known.
    """

    anchor_token_id: int
    position: int
    token_ids: Tensor
    hidden_states: Tensor
    cache: Any = None

    @classmethod
    def start(cls, token_ids: Tensor, hidden_states: Tensor, anchor_token_id: int) -> "DraftContext":
        return cls(anchor_token_id, int(token_ids.numel()), token_ids, hidden_states)

    def advance(self, token_ids: Tensor, hidden_states: Tensor, anchor_token_id: int) -> None:
        """The old anchor and the accepted tokens after it got their states; ``anchor_token_id`` is the new anchor."""
        self.token_ids = torch.cat([self.token_ids, token_ids])
        self.hidden_states = torch.cat([self.hidden_states, hidden_states])
        self.position += int(token_ids.numel())
        self.anchor_token_id = anchor_token_id

    def consumed(self) -> None:
        """The drafter has taken the new states into its cache."""
        self.token_ids, self.hidden_states = self.token_ids[:0], self.hidden_states[:0]


def anchors_of(contexts: Sequence[DraftContext]) -> Tensor:
    """int64 [R]."""
    return contexts[0].token_ids.new_tensor([context.anchor_token_id for context in contexts])


def new_states(contexts: Sequence[DraftContext]) -> tuple[Tensor, Tensor]:
    """The states that arrived, of all sequences one after the other [N, L, H], and their positions [N]."""
    ranges = [
        torch.arange(context.position - context.token_ids.numel(), context.position, device=context.token_ids.device)
        for context in contexts
    ]
    return torch.cat([context.hidden_states for context in contexts]), torch.cat(ranges)


def extend_caches(contexts: Sequence[DraftContext], layer: int, new: KeyValue) -> KeyValue:
    """Put a layer's keys and values [N, ...] of ``new_states`` into the caches; all of them, sequence by sequence."""
    counts = [context.token_ids.numel() for context in contexts]
    for context, *pair in zip(contexts, *(tensor.split(counts) for tensor in new), strict=True):
        context.cache = context.cache or []
        if layer == len(context.cache):
            context.cache.append(tuple(pair))
        else:
            context.cache[layer] = tuple(map(torch.cat, zip(context.cache[layer], pair, strict=True)))
    keys, values = zip(*(context.cache[layer] for context in contexts), strict=True)
    return (keys[0], values[0]) if len(contexts) == 1 else (torch.cat(keys), torch.cat(values))
