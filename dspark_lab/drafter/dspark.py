"""DSpark: a block drafter with a Markov head for order inside the block and a confidence head for scheduling.

Cheng et al. 2026, "Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation", arXiv 2607.05147,
sections 3.1-3.3. The paper's layout is anchor-first: slot k predicts the token k + 1 places after the anchor.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from dspark_lab.drafter.attention_kinds import AnyAttention
from dspark_lab.drafter.base import Borrowed, DraftOutput, Recipe
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.context import DraftContext, anchors_of
from dspark_lab.drafter.divergences import Divergences
from dspark_lab.drafter.format import CheckpointFormat
from dspark_lab.drafter.heads import ConfidenceHead, MarkovHead, MarkovKind
from dspark_lab.drafter.layers import SlidingWindow, initialise
from dspark_lab.drafter.losses import confidence_loss
from dspark_lab.records import Proposal, Sampling
from dspark_lab.validation import checked


class DSpark(BlockDrafter):
    """The block backbone, a Markov head (or none) and a confidence head (or none).

    ``markov_init``: *paper*, everything ~ N(0, 0.02), so small that training starts from the pure block drafter;
    *speculators*, W1 ~ N(0, 0.01) and torch's own defaults for the other parts.
    """

    checkpoint_format = CheckpointFormat("dspark", "DSparkSpeculator", "dspark", newer_runner=True)

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
        markov: MarkovKind | None,
        markov_rank: int,
        markov_init: Literal["paper", "speculators"],
        confidence: bool,
        head_chunk_tokens: int,
    ) -> None:
        if markov == "rnn" and not sample_from_anchor:
            raise ValueError(
                "markov=rnn with sample_from_anchor=false: its recurrence would begin at a slot that predicts nothing; "
                "use markov=gated or the anchor-first layout"
            )
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
            own_terms=frozenset({"confidence"} if confidence else ()),
        )
        size = borrowed.target.hidden_size
        self.markov_head = None
        if markov is not None:
            self.markov_head = MarkovHead(
                kind=markov,
                vocab_size=borrowed.target.vocab_size,
                draft_vocab_size=borrowed.vocabulary.size,
                rank=markov_rank,
                hidden_size=size,
            )
        self.confidence_head = None
        if confidence:
            if "confidence" not in self.objective.active:
                raise ValueError(
                    "confidence=true but loss.dspark.terms.confidence is 0: the head would never learn; give the term a "
                    "weight or set drafter.confidence=false"
                )
            self.confidence_head = ConfidenceHead(input_size=size + (markov_rank if markov is not None else 0))
        initialise(self, skip=self.head_modules() if markov_init == "speculators" else ())
        if markov_init == "speculators" and self.markov_head is not None:
            nn.init.normal_(self.markov_head.markov_w1.weight, std=0.01)

    def head(self, hidden: Tensor, previous_token_ids: Tensor) -> Tensor:
        # Teacher forcing in loss(): the true token before each slot; propose() passes the drawn one.
        logits = super().head(hidden, previous_token_ids)
        return logits if self.markov_head is None else self.markov_head(logits, previous_token_ids, hidden)

    def head_modules(self) -> list[nn.Module]:
        return [module for module in (self.markov_head, self.confidence_head) if module is not None]

    def own_loss_terms(self, chunk: DraftOutput, divergences: Divergences) -> dict[str, Tensor]:
        if self.confidence_head is None:
            return {}
        logits = self.confidence_logits(chunk.hidden, chunk.previous_token_ids)
        # What it should know: the probability that verification accepts a draw from q (equation 12).
        return {"confidence": confidence_loss(logits, 1.0 - divergences.values["tv"])}

    def confidence_logits(self, hidden: Tensor, previous_token_ids: Tensor) -> Tensor:
        """[..., H] and [...] -> [...]: logit of the probability that a slot is accepted given its prefix."""
        assert self.confidence_head is not None
        if self.markov_head is not None:
            hidden = torch.cat([hidden, self.markov_head.embed(previous_token_ids)], dim=-1)
        return self.confidence_head(hidden)

    @torch.inference_mode()
    def propose(
        self,
        contexts: Sequence[DraftContext],
        *,
        num_draft_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
        forced_token_ids: Tensor | None = None,
    ) -> Proposal:
        self.check_num_draft_tokens(num_draft_tokens)
        hidden = self.draft_blocks(contexts)
        # One matrix product for the block; the walk adds each slot's Markov bias, as head() does.
        block_logits = super().head(hidden, hidden.new_empty(0, dtype=torch.int64))
        state: Tensor | None = None

        def next_logits(k: int, previous: Tensor) -> Tensor:
            nonlocal state
            if self.markov_head is None:
                return block_logits[:, k]
            bias, state = self.markov_head.step(previous, hidden[:, k], state)
            return block_logits[:, k] + bias

        proposal = self.walk_slots(
            anchors_of(contexts),
            next_logits,
            num_draft_tokens=num_draft_tokens,
            sampling=sampling,
            generator=generator,
            forced_token_ids=forced_token_ids,
        )
        if self.confidence_head is None:
            return proposal
        before = torch.cat([anchors_of(contexts)[:, None], proposal.token_ids], dim=1)[:, :num_draft_tokens]
        confidence = self.confidence_logits(hidden[:, :num_draft_tokens], before).sigmoid()
        return replace(proposal, confidence=confidence)
