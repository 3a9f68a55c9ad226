"""EAGLE-3: an autoregressive drafter trained on its own earlier outputs (training-time test).

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", arXiv
2503.01840. Slot i pairs the state of token i with the embedding of token i + 1 and predicts token i + 2; step t feeds back
its own hidden state, beside the true token i + 1 + t.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from dspark_lab.drafter.attention import Visibility
from dspark_lab.drafter.attention_kinds import AnyAttention
from dspark_lab.drafter.base import Borrowed, Drafter, DraftOutput, Recipe
from dspark_lab.drafter.context import DraftContext, anchors_of, extend_caches, new_states
from dspark_lab.drafter.format import CheckpointFormat
from dspark_lab.drafter.layers import (
    ChainLayer,
    KeyValue,
    Rope,
    Rotary,
    SlidingWindow,
    initialise,
    layer_config,
    visible_by_layer,
)
from dspark_lab.records import Batch, Proposal, Sampling
from dspark_lab.validation import checked


class Eagle3(Drafter):
    """One or more decoder layers over (token embedding, hidden state), fed with their own outputs.

    ``feature_norm``: norms before ``fc``: none (the paper); *joint*, one over all captured layers (Speculators'
    ``norm_before_fc``); *layer*, one for each (``fc_norm``, EAGLE-3.1). ``norm_output``: the normed output is fed back
    (EAGLE-3.1), else the output itself. ``norm_before_residual``, ``qk_norm``: see ``ChainLayer``.
    """

    chained = True
    checkpoint_format = CheckpointFormat("eagle3", "Eagle3Speculator", "eagle3")

    @checked
    def __init__(
        self,
        *,
        borrowed: Borrowed,
        recipe: Recipe,
        num_layers: int,
        intermediate_size: int | None,
        attention: AnyAttention | None,
        ttt_steps: int,
        num_draft_tokens: int,
        feature_norm: Literal["joint", "layer"] | None,
        norm_before_residual: bool,
        norm_output: bool,
        qk_norm: bool,
        window: SlidingWindow | None,
        head_chunk_tokens: int,
    ) -> None:
        super().__init__(
            borrowed=borrowed,
            recipe=recipe,
            num_slots=ttt_steps,
            attention=attention,
            head_chunk_tokens=head_chunk_tokens,
        )
        if window is not None:
            window.check(num_layers=num_layers, least=ttt_steps)
        target = self.target
        config = layer_config(target, num_layers=num_layers, intermediate_size=intermediate_size)
        self.ttt_steps, self.num_draft_tokens = ttt_steps, num_draft_tokens
        self.norm_output, self.window_attention = norm_output, window
        size, eps = target.hidden_size, target.rms_norm_eps
        if feature_norm == "joint":
            self.input_norm = nn.RMSNorm(len(target.layer_ids) * size, eps=eps)
        if feature_norm == "layer":
            self.fc_norm = nn.ModuleList(nn.RMSNorm(size, eps=eps) for _ in target.layer_ids)
        self.feature_norm = feature_norm
        self.fc = nn.Linear(len(target.layer_ids) * size, size, bias=False)
        layers = nn.ModuleList(
            ChainLayer(config, first=index == 0, qk_norm=qk_norm, norm_before_residual=norm_before_residual)
            for index in range(num_layers)
        )
        self.layers = cast(Sequence[ChainLayer], layers)  # a ModuleList has no type of its members
        self.norm = nn.RMSNorm(target.hidden_size, eps=target.rms_norm_eps)
        self.rotary = Rotary(config)
        initialise(self)

    def forward(self, batch: Batch) -> DraftOutput:
        token_ids, position = batch.token_ids.flatten(), batch.position_ids.flatten()
        index = torch.arange(token_ids.numel(), device=token_ids.device)
        slots, supervised = self.chains(batch)
        steps = torch.arange(self.ttt_steps, device=token_ids.device)
        fed = (slots[:, None] + 1 + steps).clamp(max=token_ids.numel() - 1)  # tokens fed at each step, [A, S]

        causal = Visibility(lower=index - position, upper=index + 1, group_size=1)
        hidden, contexts = self.first_step(
            self.fuse(batch.hidden_states.flatten(0, 1)), token_ids.roll(-1), self.rotary(position), causal, slots
        )
        outputs = [hidden]
        own: list[list[KeyValue]] = [[] for _ in self.layers]
        for step in range(1, self.ttt_steps):
            rope = self.rotary(position[slots] + step)
            visible = self.visible(causal[slots], step=self.steps_ahead(step))
            outputs.append(self.next_step(outputs[-1], token_ids[fed[:, step]], rope, contexts, own, visible))
        hidden = torch.stack(outputs, dim=1)
        return DraftOutput(
            hidden=hidden if self.norm_output else self.norm(hidden),
            previous_token_ids=token_ids[fed],
            labels=token_ids[(fed + 1).clamp(max=token_ids.numel() - 1)],
            supervised=supervised,
            teacher=fed,
            target_states=batch.last_hidden_state.flatten(0, 1),
        )

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Captured states [N, L, H] -> [N, H]."""
        features = self.features(hidden_states)
        if self.feature_norm == "joint":
            features = self.input_norm(features)
        if self.feature_norm == "layer":
            chunks = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(features)

    def output(self, hidden: Tensor) -> Tensor:
        """What is fed back of the last layer's output; the logits are the head's of ``norm(output)``, normed once."""
        return self.norm(hidden) if self.norm_output else hidden

    def steps_ahead(self, step: int) -> int:
        """How far a window has moved at ``step`` of the training graph."""
        return step if self.window_attention is not None and self.window_attention.origin == "query" else 0

    def visible(self, full: Visibility, *, step: int) -> list[Visibility]:
        """What each layer's queries see at a step: all, or the window that ends ``step`` places after the first query."""
        return visible_by_layer(self.window_attention, full, ahead=step, num_layers=len(self.layers))

    def chains(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Slots [A] with at least one supervised step, and which steps are, bool [A, S].

        At step t slot i is fed token i + 1 + t and predicts token i + 2 + t. *drafted*: both are the assistant's: a run of
        True. *speculators*: the fed token is. *deepspec*: token i + t is (algorithms.md 1.4). None leaves the document.
        """
        mask, document = batch.loss_mask.flatten(), batch.document_ids.flatten()
        slot = torch.arange(mask.numel(), device=mask.device)
        fed = slot[:, None] + 1 + torch.arange(self.ttt_steps, device=mask.device)
        last = mask.numel() - 1

        def assistants(index: Tensor) -> Tensor:
            inside = (index <= last) & (document[index.clamp(max=last)] == document[slot][:, None])
            return inside & mask[index.clamp(max=last)]

        if self.recipe.loss.supervision == "drafted":
            supervised = (assistants(fed) & assistants(fed + 1)).cumprod(dim=1).bool()
        elif self.recipe.loss.supervision == "speculators":
            supervised = assistants(fed)
        else:
            supervised = (
                assistants(fed - 1) & (fed <= last) & (document[fed.clamp(max=last)] == document[slot][:, None])
            )
        slots = supervised.any(dim=1).nonzero().flatten()
        return slots, supervised[slots]

    def first_step(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        rope: Rope,
        visibility: Visibility,
        slots: Tensor,
        remember: Callable[[int, KeyValue], KeyValue] = lambda layer, new: new,
    ) -> tuple[Tensor, list[KeyValue]]:
        """States [N, H] and next tokens [N] -> outputs at ``slots`` [A, H], and each layer's keys and values.

        Every layer but the last needs all outputs, as keys of the next one; the last only needs those of the slots.
        """
        embeddings = self.target_head.embed(token_ids).to(hidden.dtype)
        contexts = []
        for depth, (layer, visible) in enumerate(zip(self.layers, self.visible(visibility, step=0), strict=True)):
            inputs, residual = layer.inputs(embeddings, hidden)
            context = remember(depth, layer.self_attn.keys_values(inputs, rope))
            contexts.append(context)
            if depth == len(self.layers) - 1:
                inputs, residual, rope = inputs[slots], residual[slots], (rope[0][slots], rope[1][slots])
                visible = visible[slots]
            hidden = layer(inputs, residual, rope, context, [], visible)
        return self.output(hidden), contexts

    def next_step(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        rope: Rope,
        contexts: list[KeyValue],
        own: list[list[KeyValue]],
        visible: list[Visibility],
    ) -> Tensor:
        """One more step of each chain: fed-back states [A, H] and tokens [A] -> [A, H]. Appends to ``own``."""
        embeddings = self.target_head.embed(token_ids).to(hidden.dtype)
        for layer, context, mine, visibility in zip(self.layers, contexts, own, visible, strict=True):
            inputs, residual = layer.inputs(embeddings, hidden)
            mine.append(layer.self_attn.keys_values(inputs, rope))
            hidden = layer(inputs, residual, rope, context, mine, visibility)
        return self.output(hidden)

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
        chain = _Chain(self, contexts)
        return self.walk_slots(
            anchors_of(contexts),
            lambda k, previous: self.head(chain.step(k, previous), previous),
            num_draft_tokens=num_draft_tokens,
            sampling=sampling,
            generator=generator,
            forced_token_ids=forced_token_ids,
        )


class _Chain:
    """The steps of R proposals: step 0 takes in the new states, each later one the tokens just drafted."""

    def __init__(self, drafter: Eagle3, contexts: Sequence[DraftContext]) -> None:
        self.drafter, device = drafter, drafter.device
        hidden_states, positions = new_states(contexts)
        anchors = zip(contexts, anchors_of(contexts).split(1), strict=True)
        next_ids = torch.cat([torch.cat([context.token_ids[1:], anchor]) for context, anchor in anchors])
        counts = torch.tensor([context.token_ids.numel() for context in contexts], device=device)
        known = torch.tensor([context.position for context in contexts], device=device)
        first = (known.cumsum(0) - known).repeat_interleave(counts)  # of a sequence among the keys of all
        causal = Visibility(first, first + positions + 1, 1)
        last = counts.cumsum(0) - 1
        self.positions = positions[last]
        self.hidden, self.contexts = drafter.first_step(
            drafter.fuse(hidden_states),
            next_ids,
            drafter.rotary(positions),
            causal,
            last,
            remember=partial(extend_caches, contexts),
        )
        for context in contexts:
            context.consumed()
        self.own: list[list[KeyValue]] = [[] for _ in drafter.layers]
        self.causal = causal[last]

    def step(self, k: int, previous: Tensor) -> Tensor:
        """Normed hidden states [R, H] that predict draft token k; ``previous`` [R] are the tokens before it.

        A window moves with the query, as in the engine.
        """
        if k > 0:
            rope = self.drafter.rotary(self.positions + k)
            visible = self.drafter.visible(self.causal, step=k)
            self.hidden = self.drafter.next_step(self.hidden, previous, rope, self.contexts, self.own, visible)
        return self.hidden if self.drafter.norm_output else self.drafter.norm(self.hidden)
