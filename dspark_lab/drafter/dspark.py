"""DSpark: a block drafter with a Markov head for order inside the block and a confidence head for scheduling.

Cheng et al. 2026, "Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation", arXiv 2607.05147,
sections 3.1-3.3. Layout anchor-first: slot k predicts the token k + 1 places after the anchor.
"""

import torch
from torch import Tensor, nn

from dspark_lab.drafter.base import Borrowed, DraftOutput, Recipe
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.context import DraftContext
from dspark_lab.drafter.heads import ConfidenceHead, MarkovHead
from dspark_lab.drafter.layers import initialise
from dspark_lab.drafter.losses import LossTerms, confidence_loss, cross_entropy, total_variation
from dspark_lab.records import Batch, Proposal, Sampling
from dspark_lab.validation import checked


class DSpark(BlockDrafter):
    """Loss per slot, decayed by exp(-k / gamma): ``ce_weight`` CE on the answer's tokens + ``l1_weight`` |p - q|_1
    + ``confidence_weight`` BCE of the confidence against the analytic acceptance 1 - TV(p, q) (equations 9-12).
    """

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
        markov_rank: int,
        ce_weight: float,
        l1_weight: float,
        confidence_weight: float,
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
            sample_from_anchor=True,
        )
        target = borrowed.target
        self.markov_head = MarkovHead(
            vocab_size=target.vocab_size, draft_vocab_size=borrowed.vocabulary.size, rank=markov_rank
        )
        self.confidence_head = ConfidenceHead(input_size=target.hidden_size + markov_rank)
        self.loss_weights = {"ce": ce_weight, "l1": l1_weight, "confidence": confidence_weight}
        initialise(self)

    def head(self, hidden: Tensor, previous_token_ids: Tensor) -> Tensor:
        # Teacher forcing in loss(): the true token before each slot; propose() passes the drawn one.
        return super().head(hidden, previous_token_ids) + self.markov_head(previous_token_ids)

    def head_modules(self) -> list[nn.Module]:
        return [self.markov_head, self.confidence_head]

    def confidence_logits(self, hidden: Tensor, previous_token_ids: Tensor) -> Tensor:
        return self.confidence_head(hidden, self.markov_head.markov_w1(previous_token_ids))

    def loss(self, output: DraftOutput, batch: Batch) -> LossTerms:
        def objective(chunk: DraftOutput) -> dict[str, Tensor]:
            slots = self.decay * chunk.supervised
            labels, in_vocabulary = self.vocabulary.to_draft(chunk.labels)
            logits = self.head(chunk.hidden, chunk.previous_token_ids)
            distance = total_variation(logits, self.teacher_logits(chunk.teacher_hidden))
            confidence = self.confidence_logits(chunk.hidden, chunk.previous_token_ids)
            return {
                "ce": (slots * in_vocabulary * cross_entropy(logits, labels)).sum(),
                "l1": (slots * 2.0 * distance).sum(),
                "confidence": (slots * confidence_loss(confidence, 1.0 - distance)).sum(),
            }

        denominator = (self.decay * output.supervised).sum() + 1e-6
        return self.walk(output, objective, weights=self.loss_weights, denominator=denominator)

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
        # One matrix product for the block; the walk adds each slot's Markov bias, as head() does.
        block_logits = super().head(hidden, hidden.new_empty(0, dtype=torch.int64))
        token_ids, distributions = self.walk_slots(
            context.anchor_token_id,
            lambda k, previous: block_logits[k] + self.markov_head(previous),
            num_draft_tokens=num_draft_tokens,
            sampling=sampling,
            generator=generator,
            forced_token_ids=forced_token_ids,
        )
        before = torch.cat([token_ids.new_tensor([context.anchor_token_id]), token_ids])[:num_draft_tokens]
        confidence = self.confidence_logits(hidden[:num_draft_tokens], before).sigmoid()
        return Proposal(token_ids, distributions, confidence)
