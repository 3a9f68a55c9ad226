"""DFlash: a block drafter that predicts all slots at once, independently of each other.

"DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036. Slot 0 holds the anchor, the others mask tokens.
The paper's layout is 1 + N: slot k predicts the token k places after the anchor.
"""

from collections.abc import Sequence

import torch

from dspark_lab.drafter.attention_kinds import AnyAttention
from dspark_lab.drafter.base import Borrowed, Recipe
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.context import DraftContext
from dspark_lab.drafter.format import CheckpointFormat
from dspark_lab.drafter.layers import SlidingWindow, initialise
from dspark_lab.records import Proposal, Sampling
from dspark_lab.validation import checked


class DFlash(BlockDrafter):
    """The shared backbone and the frozen vocabulary matrix, nothing else."""

    checkpoint_format = CheckpointFormat("dflash", "DFlashSpeculator", "dflash")

    @checked
    def __init__(
        self,
        *,
        borrowed: Borrowed,
        recipe: Recipe,
        num_layers: int,
        intermediate_size: int | None,
        attention: AnyAttention | None,
        block_size: int,
        num_anchors: int,
        sample_from_anchor: bool,
        window: SlidingWindow | None,
        head_chunk_tokens: int,
    ) -> None:
        super().__init__(
            borrowed=borrowed,
            recipe=recipe,
            head_chunk_tokens=head_chunk_tokens,
            num_layers=num_layers,
            intermediate_size=intermediate_size,
            attention=attention,
            block_size=block_size,
            num_anchors=num_anchors,
            sample_from_anchor=sample_from_anchor,
            window=window,
        )
        initialise(self)

    @torch.inference_mode()
    def propose(
        self,
        contexts: Sequence[DraftContext],
        *,
        num_draft_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
        forced_token_ids: torch.Tensor | None = None,
    ) -> Proposal:
        self.check_num_draft_tokens(num_draft_tokens)
        hidden = self.draft_blocks(contexts)
        logits = self.head(hidden, hidden.new_empty(0, dtype=torch.int64))
        return self.choose(logits[:, :num_draft_tokens], sampling, generator, forced_token_ids)
