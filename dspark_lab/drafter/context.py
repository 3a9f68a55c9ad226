"""What a drafter may know of one sequence when it drafts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
