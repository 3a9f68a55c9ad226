"""DFlash: a block drafter that predicts all slots at once, independently of each other.

"DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036. Layout 1 + N: slot 0 holds the anchor, the
others mask tokens; slot k predicts the token k places after the anchor.
"""

import torch
from torch import Tensor

from dspark_lab.drafter.base import Borrowed, DraftOutput, Recipe
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.context import DraftContext
from dspark_lab.drafter.layers import initialise
from dspark_lab.drafter.losses import LossTerms, cross_entropy
from dspark_lab.records import Batch, Proposal, Sampling
from dspark_lab.validation import checked


class DFlash(BlockDrafter):
    """Cross-entropy on the answer's own tokens, decayed by exp(-(k - 1) / gamma) over the slots k = 1..B-1."""

    @checked
    def __init__(
        self,
        *,
        borrowed: Borrowed,
        recipe: Recipe,
        num_layers: int,
        intermediate_size: int | None,
        block_size: int,
        num_anchors: int,
        decay_gamma: float,
        head_chunk_tokens: int,
    ) -> None:
        super().__init__(
            borrowed=borrowed,
            recipe=recipe,
            head_chunk_tokens=head_chunk_tokens,
            num_layers=num_layers,
            intermediate_size=intermediate_size,
            block_size=block_size,
            num_anchors=num_anchors,
            decay_gamma=decay_gamma,
            sample_from_anchor=False,
        )
        initialise(self)

    def loss(self, output: DraftOutput, batch: Batch) -> LossTerms:
        def objective(chunk: DraftOutput) -> dict[str, Tensor]:
            labels, in_vocabulary = self.vocabulary.to_draft(chunk.labels)
            slots = self.decay * chunk.supervised * in_vocabulary
            return {"ce": (slots * cross_entropy(self.head(chunk.hidden, chunk.previous_token_ids), labels)).sum()}

        denominator = (self.decay * output.supervised).sum() + 1e-6
        return self.walk(output, objective, weights={"ce": 1.0}, denominator=denominator)

    @torch.inference_mode()
    def propose(
        self,
        context: DraftContext,
        *,
        num_draft_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
        forced_token_ids: Tensor | None = None,
    ) -> Proposal:
        self.check_num_draft_tokens(num_draft_tokens)
        hidden = self.draft_block(context)
        logits = self.head(hidden, hidden.new_empty(0, dtype=torch.int64))
        token_ids, distributions = self.choose(logits[:num_draft_tokens], sampling, generator, forced_token_ids)
        return Proposal(token_ids, distributions)
