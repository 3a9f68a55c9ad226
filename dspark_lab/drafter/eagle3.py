"""EAGLE-3: an autoregressive drafter trained on its own earlier outputs (training-time test).

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", arXiv
2503.01840. Slot i pairs the state of token i with the embedding of token i + 1 and predicts token i + 2; step t feeds back
its own hidden state, beside the true token i + 1 + t.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from dspark_lab.drafter.anchors import supervised_pairs
from dspark_lab.drafter.attention import Visibility
from dspark_lab.drafter.base import Borrowed, Drafter, DraftOutput, Recipe
from dspark_lab.drafter.context import DraftContext
from dspark_lab.drafter.layers import ChainLayer, KeyValue, Rope, Rotary, initialise, layer_config
from dspark_lab.drafter.losses import LossTerms, soft_cross_entropy
from dspark_lab.records import Batch, Proposal, Sampling
from dspark_lab.validation import checked


class Eagle3(Drafter):
    """Soft cross-entropy against the target's distribution on the draft vocabulary, step t weighted by ``step_decay``^t."""

    step_weights: Tensor

    @checked
    def __init__(
        self,
        *,
        borrowed: Borrowed,
        recipe: Recipe,
        num_layers: int,
        intermediate_size: int | None,
        ttt_steps: int,
        step_decay: float,
        num_draft_tokens: int,
        head_chunk_tokens: int,
    ) -> None:
        super().__init__(borrowed=borrowed, recipe=recipe, head_chunk_tokens=head_chunk_tokens)
        target = borrowed.target
        config = layer_config(target, num_layers=num_layers, intermediate_size=intermediate_size)
        self.ttt_steps, self.num_draft_tokens = ttt_steps, num_draft_tokens
        self.register_buffer("step_weights", step_decay ** torch.arange(ttt_steps).float(), persistent=False)
        self.fc = nn.Linear(len(target.layer_ids) * target.hidden_size, target.hidden_size, bias=False)
        layers = nn.ModuleList(ChainLayer(config, first=index == 0) for index in range(num_layers))
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

        rope = self.rotary(position)
        causal = Visibility(lower=index - position, upper=index + 1, group_size=1)
        hidden, contexts = self.first_step(
            self.fc(self.features(batch.hidden_states.flatten(0, 1))), token_ids.roll(-1), rope, causal, slots
        )
        outputs = [hidden]
        own: list[list[KeyValue]] = [[] for _ in self.layers]
        visible = Visibility(causal.lower[slots], causal.upper[slots], 1)
        for step in range(1, self.ttt_steps):
            rope = self.rotary(position[slots] + step)
            outputs.append(self.next_step(outputs[-1], token_ids[fed[:, step]], rope, contexts, own, visible))
        return DraftOutput(
            hidden=self.norm(torch.stack(outputs, dim=1)),
            previous_token_ids=token_ids[fed],
            labels=token_ids[(fed + 1).clamp(max=token_ids.numel() - 1)],
            supervised=supervised,
            teacher_hidden=batch.last_hidden_state.flatten(0, 1)[fed],
        )

    def chains(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Slots [A] with at least one supervised step, and which steps are, bool [A, S] (a run of True).

        Slot i is supervised at step t if tokens i + 1 + t (fed) and i + 2 + t (label) are the assistant's, in one document.
        """
        pairs, document = supervised_pairs(batch), batch.document_ids.flatten()
        starts = pairs.clone()
        starts[0] = False
        starts[1:] &= document[1:] == document[:-1]  # the state of the token before must exist in this document
        slots = starts.nonzero().flatten() - 1
        fed = slots[:, None] + 1 + torch.arange(self.ttt_steps, device=slots.device)
        inside = fed < pairs.numel()
        fed = fed.clamp(max=pairs.numel() - 1)
        valid = inside & pairs[fed] & (document[fed] == document[slots][:, None])
        return slots, valid.cumprod(dim=1).bool()

    def first_step(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        rope: Rope,
        visibility: Visibility,
        slots: Tensor,
        past: list[KeyValue] | None = None,
    ) -> tuple[Tensor, list[KeyValue]]:
        """States [N, H] and next tokens [N] -> outputs at ``slots`` [A, H], and each layer's keys and values.

        Every layer but the last needs all outputs, as keys of the next one; the last only needs those of the slots.
        """
        embeddings = self.target_head.embed(token_ids).to(hidden.dtype)
        contexts = []
        for depth, layer in enumerate(self.layers):
            inputs = layer.inputs(embeddings, hidden)
            context = layer.self_attn.keys_values(inputs, rope)
            if past is not None:
                context = torch.cat([past[depth][0], context[0]]), torch.cat([past[depth][1], context[1]])
            contexts.append(context)
            if depth == len(self.layers) - 1:
                inputs, hidden, rope = inputs[slots], hidden[slots], (rope[0][slots], rope[1][slots])
                visibility = Visibility(visibility.lower[slots], visibility.upper[slots], 1)
            hidden = layer(inputs, hidden, rope, context, [], visibility)
        return hidden, contexts

    def next_step(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        rope: Rope,
        contexts: list[KeyValue],
        own: list[list[KeyValue]],
        visibility: Visibility,
    ) -> Tensor:
        """One more step of each chain: fed-back states [A, H] and tokens [A] -> [A, H]. Appends to ``own``."""
        embeddings = self.target_head.embed(token_ids).to(hidden.dtype)
        for layer, context, mine in zip(self.layers, contexts, own, strict=True):
            inputs = layer.inputs(embeddings, hidden)
            mine.append(layer.self_attn.keys_values(inputs, rope))
            hidden = layer(inputs, hidden, rope, context, mine, visibility)
        return hidden

    def loss(self, output: DraftOutput, batch: Batch) -> LossTerms:
        # Each step is the mean over its own supervised slots: sum_t w_t * mean_i = sum_t,i w_t / count_t.
        counts = output.supervised.sum(dim=0).clamp(min=1)
        weights = self.step_weights / counts

        def objective(chunk: DraftOutput) -> dict[str, Tensor]:
            logits = self.head(chunk.hidden, chunk.previous_token_ids)
            terms = soft_cross_entropy(logits, self.teacher_logits(chunk.teacher_hidden))
            return {"soft_ce": (weights * chunk.supervised * terms).sum()}

        return self.walk(output, objective, weights={"soft_ce": 1.0}, denominator=weights.new_ones(()))

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
        chain = _Chain(self, context)
        token_ids, distributions = self.walk_slots(
            context.anchor_token_id,
            lambda k, previous: self.head(self.norm(chain.step(k, previous)), previous),
            num_draft_tokens=num_draft_tokens,
            sampling=sampling,
            generator=generator,
            forced_token_ids=forced_token_ids,
        )
        return Proposal(token_ids, distributions)


class _Chain:
    """The steps of one proposal: step 0 takes in the new states, each later one the token just drafted."""

    def __init__(self, drafter: Eagle3, context: DraftContext) -> None:
        self.drafter, self.position = drafter, context.position
        new = torch.arange(context.position - context.token_ids.numel(), context.position, device=drafter.device)
        next_ids = torch.cat([context.token_ids[1:], context.token_ids.new_tensor([context.anchor_token_id])])
        hidden = drafter.fc(drafter.features(context.hidden_states))
        causal = Visibility(torch.zeros_like(new), new + 1, 1)
        last = torch.tensor([new.numel() - 1], device=drafter.device)
        self.hidden, context.cache = drafter.first_step(
            hidden, next_ids, drafter.rotary(new), causal, last, context.cache
        )
        context.consumed()
        self.contexts = context.cache
        self.own: list[list[KeyValue]] = [[] for _ in drafter.layers]
        self.visible = Visibility(causal.lower[last], causal.upper[last], 1)

    def step(self, k: int, previous: Tensor) -> Tensor:
        """Hidden state [H] that predicts draft token k; ``previous`` is the token before it."""
        if k > 0:
            rope = self.drafter.rotary(torch.tensor([self.position - 1 + k], device=self.drafter.device))
            self.hidden = self.drafter.next_step(
                self.hidden, previous[None], rope, self.contexts, self.own, self.visible
            )
        return self.hidden[0]
