"""The backbone that block drafters share: all slots of a block at once, over the target's states before its anchor."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from dspark_lab.drafter.anchors import Blocks, block_candidates, gather_blocks, sample_anchors
from dspark_lab.drafter.attention import Visibility
from dspark_lab.drafter.attention_kinds import AnyAttention, LatentAttention
from dspark_lab.drafter.base import Borrowed, Drafter, DraftOutput, Recipe
from dspark_lab.drafter.context import DraftContext, anchors_of, extend_caches, new_states
from dspark_lab.drafter.layers import BlockLayer, KeyValue, Rotary, SlidingWindow, layer_config, visible_by_layer
from dspark_lab.drafter.mla import latent_layer
from dspark_lab.records import Batch


class BlockDrafter(Drafter):
    """c = hidden_norm(fc(states)) is the context of every layer; [anchor, MASK, ...] is drafted over it.

    Algorithms.md 2.2. Anchor-first (``sample_from_anchor``): every slot predicts; 1 + N: the slots after the anchor do.
    """

    takes_latents = True

    def __init__(
        self,
        *,
        borrowed: Borrowed,
        recipe: Recipe,
        head_chunk_tokens: int,
        num_layers: int,
        intermediate_size: int | None,
        attention: AnyAttention | None,
        block_size: int,
        num_anchors: int,
        sample_from_anchor: bool,
        window: SlidingWindow | None,
        own_terms: frozenset[str] = frozenset(),
        make_layer: Callable[[Qwen3Config], BlockLayer] = BlockLayer,
    ) -> None:
        if block_size < 2:
            raise ValueError(f"block_size={block_size} must be at least 2: the anchor and a slot to predict")
        num_slots = block_size if sample_from_anchor else block_size - 1
        super().__init__(
            borrowed=borrowed,
            recipe=recipe,
            num_slots=num_slots,
            attention=attention,
            head_chunk_tokens=head_chunk_tokens,
            own_terms=own_terms,
        )
        if window is not None:
            window.check(num_layers=num_layers, least=block_size)
        target = self.target
        config = layer_config(target, num_layers=num_layers, intermediate_size=intermediate_size)
        self.block_size, self.num_anchors, self.sample_from_anchor = block_size, num_anchors, sample_from_anchor
        self.num_draft_tokens, self.window_attention = num_slots, window
        self.fc = nn.Linear(len(target.layer_ids) * target.hidden_size, target.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(target.hidden_size, eps=target.rms_norm_eps)
        self.latent = attention if isinstance(attention, LatentAttention) else None
        if self.latent is not None:
            make_layer = partial(latent_layer, self.latent)
        layers = nn.ModuleList(make_layer(config) for _ in range(num_layers))
        self.layers = cast(Sequence[BlockLayer], layers)  # a ModuleList has no type of its members
        self.norm = nn.RMSNorm(target.hidden_size, eps=target.rms_norm_eps)
        self.rotary = Rotary(config)

    def forward(self, batch: Batch) -> DraftOutput:
        blocks = self.blocks(batch, self.anchors(batch))
        context = self.context(batch.hidden_states.flatten(0, 1), batch.position_ids.flatten())
        visible = self.visible(blocks.visibility, serving=False)
        hidden = self.backbone(blocks.token_ids, blocks.position_ids, context, visible)
        return DraftOutput(
            hidden=hidden,
            previous_token_ids=blocks.previous_token_ids,
            labels=blocks.labels,
            supervised=blocks.supervised,
            teacher=blocks.teacher,
            target_states=batch.last_hidden_state.flatten(0, 1),
        )

    def anchors(self, batch: Batch) -> Tensor:
        """int64 [A]: indices into the flattened batch."""
        candidates = block_candidates(batch, supervision=self.recipe.loss.supervision, block_size=self.block_size)
        return sample_anchors(batch, candidates, num_anchors=self.num_anchors, seed=self.recipe.seed)

    def visible(self, full: Visibility, *, serving: bool) -> list[Visibility]:
        """What each layer's queries see: everything, or a window that ends at the anchor or, in engines, at the query."""
        window = self.window_attention
        slot = torch.arange(full.lower.numel(), device=full.lower.device) % self.block_size
        from_query = window is not None and (serving or window.origin == "query")
        return visible_by_layer(window, full, ahead=slot + 1 if from_query else 0, num_layers=len(self.layers))

    def blocks(self, batch: Batch, anchors: Tensor) -> Blocks:
        return gather_blocks(
            batch,
            anchors,
            block_size=self.block_size,
            mask_token_id=self.target.mask_token_id,
            sample_from_anchor=self.sample_from_anchor,
            supervision=self.recipe.loss.supervision,
        )

    def context(self, hidden_states: Tensor, position_ids: Tensor) -> list[KeyValue]:
        """Keys and values of every layer for captured states [N, L, H] at positions [N]."""
        states = self.hidden_norm(self.fc(self.features(hidden_states)))
        rope = self.rotary(position_ids)
        return [layer.self_attn.keys_values(states, rope) for layer in self.layers]

    def backbone(
        self, token_ids: Tensor, position_ids: Tensor, context: list[KeyValue], visible: list[Visibility]
    ) -> Tensor:
        """Block ids and positions [A, B] -> normed hidden states of the predicting slots [A, S, H]."""
        states = self.target_head.embed(token_ids.flatten()).to(self.fc.weight.dtype)
        rope = self.rotary(position_ids.flatten())
        for layer, keys_values, visibility in zip(self.layers, context, visible, strict=True):
            states = layer(states, rope, keys_values, visibility)
        hidden = self.norm(states).unflatten(0, token_ids.shape)
        # Contiguous: a strided input makes F.linear a batch of small products, at a third of the speed.
        return hidden if self.sample_from_anchor else hidden[:, 1:].contiguous()

    def draft_blocks(self, contexts: Sequence[DraftContext]) -> Tensor:
        """Hidden states [R, S, H] of the blocks at R anchors; new states go into the caches, the blocks do not.

        The whole trained block is always computed, also when fewer tokens are wanted: with fewer mask tokens it would see
        something it was never trained on. A window ends at each query, as in the engine.
        """
        hidden_states, positions = new_states(contexts)
        layers = self.context(hidden_states, positions)
        keys_values = [extend_caches(contexts, layer, new) for layer, new in enumerate(layers)]
        for context in contexts:
            context.consumed()
        ids = torch.full((len(contexts), self.block_size), self.target.mask_token_id, device=self.device)
        ids[:, 0] = anchors_of(contexts)
        known = torch.tensor([context.position for context in contexts], device=self.device)
        upper = known.cumsum(0).repeat_interleave(self.block_size)
        full = Visibility(upper - known.repeat_interleave(self.block_size), upper, self.block_size)
        positions = known[:, None] + torch.arange(self.block_size, device=self.device)
        return self.backbone(ids, positions, keys_values, self.visible(full, serving=True))
