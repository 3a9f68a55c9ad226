"""DFlash2: DFlash with convolutions inside its layers and a selector that orders its candidates.

Algorithms.md 2.5; z-lab and inco.ai 2026, as vLLM 0.32 serves it (``DFlash2DraftModel``). Two things are added to DFlash:

* Around attention and MLP of every layer, a convolution over the slots of a block, along ``conv_kernel_size`` slots from
  the one itself backwards: y_k = sum_t (base_t + delta_t(k)) * x_(k-t). The kernel of slot k has a part delta(k) of its own,
  computed from its normed input and shared by ``conv_group_size`` channels. Slots before the anchor's count as 0.
* Of the ``selector_top_k`` most likely tokens of a slot, the one that follows ``a`` best:
  S(b) = U(b) + <P[a] * (W h), Q[b]>, all other tokens have no chance.

What the sources leave open, and what is done here. *Labels that are no candidate*: the selector learns nothing in such
slots, as in 2.5; Speculators 0.9 puts the label in the last candidate's place, which teaches a choice that serving never
has. *Its label* is that of ``ce``, and so are its weights: with D-PACE those by U, where Speculators weighs the selector by
S. *Gradient* flows through the candidates' U too, as in Speculators. *Start*: identity
convolutions and Q = 0, so a DFlash that draws from its top k. *Draft vocabulary*: P and Q are looked up with target ids,
like everything that names tokens in a checkpoint; vLLM serves the full vocabulary only. *Objective*: ``loss.other``, and the
selector's term by ``selector_weight``.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config

from dspark_lab.drafter.attention import Visibility
from dspark_lab.drafter.attention_kinds import AnyAttention
from dspark_lab.drafter.base import Borrowed, DraftOutput, Recipe
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.context import DraftContext, anchors_of
from dspark_lab.drafter.divergences import Divergences
from dspark_lab.drafter.format import CheckpointFormat
from dspark_lab.drafter.layers import BlockLayer, KeyValue, Rope, SlidingWindow, initialise
from dspark_lab.records import Proposal, Sampling
from dspark_lab.validation import checked


class DFlash2(BlockDrafter):
    """``BlockDrafter`` with ``ConvolvedLayer``s and a ``CandidateSelector``."""

    takes_latents = False

    checkpoint_format = CheckpointFormat(
        "dflash2",
        "DFlash2DraftModel",
        "dflash",
        own_keys={"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16},
        full_vocabulary=True,
        newer_runner=True,
    )

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
        conv_kernel_size: int,
        conv_group_size: int,
        selector_rank: int,
        selector_top_k: int,
        selector_weight: float,
        head_chunk_tokens: int,
    ) -> None:
        size, vocabulary = borrowed.target.hidden_size, borrowed.vocabulary
        if not 1 <= conv_kernel_size <= block_size:
            raise ValueError(f"conv_kernel_size={conv_kernel_size}: must lie in 1..{block_size}, the slots of a block")
        if size % conv_group_size:
            raise ValueError(f"conv_group_size={conv_group_size} must divide the target's hidden size, {size}")
        if not 1 <= selector_top_k <= vocabulary.size:
            raise ValueError(
                f"selector_top_k={selector_top_k}: must lie in 1..{vocabulary.size}, the tokens drafted from"
            )
        make_layer = partial(
            ConvolvedLayer, block_size=block_size, kernel_size=conv_kernel_size, group_size=conv_group_size
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
            own_terms=frozenset({"selector"}),
            make_layer=make_layer,
        )
        if "selector" in self.objective.terms:
            raise ValueError(
                "the selector's loss is weighed by drafter.selector_weight: take `selector` out of loss.*.terms"
            )
        self.objective = replace(self.objective, terms={**self.objective.terms, "selector": selector_weight})
        self.conv_kernel_size, self.conv_group_size = conv_kernel_size, conv_group_size
        self.selector_rank, self.selector_top_k = selector_rank, selector_top_k
        self.candidate_selector = CandidateSelector(
            hidden_size=size, vocab_size=borrowed.target.vocab_size, rank=selector_rank
        )
        initialise(self)
        for part in self.modules():
            if isinstance(part, DynamicConvolution):
                part.become_identity()

    def head(self, hidden: Tensor, previous_token_ids: Tensor) -> Tensor:
        """What ``propose`` draws from: S of the candidates, minus infinity elsewhere."""
        return self.rescored(super().head(hidden, previous_token_ids), hidden, previous_token_ids)

    def rescored(self, logits: Tensor, hidden: Tensor, previous_token_ids: Tensor) -> Tensor:
        """U [..., V_d] of states [..., H] behind tokens [...] -> S [..., V_d]."""
        unary, candidates = logits.topk(self.selector_top_k, dim=-1)
        edges = self.candidate_selector(hidden, previous_token_ids, self.vocabulary.to_target(candidates))
        return torch.full_like(logits, -torch.inf).scatter(-1, candidates, unary + edges)

    def loss_logits(self, chunk: DraftOutput) -> Tensor:
        """U: it must know which tokens are likely, whatever its top k is."""
        return super().head(chunk.hidden, chunk.previous_token_ids)

    def own_loss_terms(self, chunk: DraftOutput, divergences: Divergences) -> dict[str, Tensor]:
        """Cross-entropy among the candidates, behind the true token; 0 where the label is none of them."""
        with torch.no_grad():  # once more: the divergences have turned the chunk's logits into their gradient
            candidates = self.loss_logits(chunk).topk(self.selector_top_k, dim=-1).indices
        unary = (self.head_rows[candidates].to(chunk.hidden.dtype) @ chunk.hidden[..., None]).squeeze(-1)
        edges = self.candidate_selector(chunk.hidden, chunk.previous_token_ids, self.vocabulary.to_target(candidates))
        found = candidates == divergences.labels[..., None]
        log_q = (unary + edges).float().log_softmax(-1)
        return {"selector": -(log_q * found).sum(-1)}

    def head_modules(self) -> list[nn.Module]:
        return [self.candidate_selector]

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
        # One matrix product for the block; the walk scores each slot behind the token that was drawn, as head() does.
        block_logits = super().head(hidden, hidden.new_empty(0, dtype=torch.int64))
        return self.walk_slots(
            anchors_of(contexts),
            lambda k, previous: self.rescored(block_logits[:, k], hidden[:, k], previous),
            num_draft_tokens=num_draft_tokens,
            sampling=sampling,
            generator=generator,
            forced_token_ids=forced_token_ids,
        )


class ConvolvedLayer(BlockLayer):
    """A block layer whose attention and MLP each stand between two convolutions; context states pass by all of them."""

    def __init__(self, config: Qwen3Config, *, block_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__(config)
        convolution = partial(
            DynamicConvolution,
            hidden_size=config.hidden_size,
            block_size=block_size,
            kernel_size=kernel_size,
            group_size=group_size,
        )
        self.attention_conv, self.mlp_conv = convolution(), convolution()

    def forward(self, states: Tensor, rope: Rope, context: KeyValue, visibility: Visibility) -> Tensor:
        """states [Q, H], context keys and values [N, Hkv, D] -> [Q, H]."""
        normed = self.input_layernorm(states)
        before, after = self.attention_conv.kernels(normed)
        normed = self.attention_conv(normed, before)
        query = self.self_attn.queries(normed, rope)
        own = [self.self_attn.keys_values(normed, rope)]
        states = states + self.attention_conv(self.self_attn(query, context, own, visibility), after)

        normed = self.post_attention_layernorm(states)
        before, after = self.mlp_conv.kernels(normed)
        return states + self.mlp_conv(self.mlp(self.mlp_conv(normed, before)), after)


class DynamicConvolution(nn.Module):
    """Two depthwise convolutions inside each block, before and after a sublayer, whose kernels one projection computes."""

    def __init__(self, *, hidden_size: int, block_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.block_size, self.group_size = block_size, group_size
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, hidden_size))
        num_kernels = 2 * kernel_size * (hidden_size // group_size)
        self.kernel_projection = nn.Linear(hidden_size, num_kernels, bias=False)

    @torch.no_grad()
    def become_identity(self) -> None:
        self.base_kernel.zero_()[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def kernels(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [Q, H] of a sublayer -> kernels [Q, K, H] of the convolutions before and after it."""
        sides, taps, size = self.base_kernel.shape
        delta = self.kernel_projection(normed).view(-1, sides, taps, size // self.group_size)
        kernel = self.base_kernel + delta.repeat_interleave(self.group_size, dim=-1)
        return kernel[:, 0], kernel[:, 1]

    def forward(self, states: Tensor, kernel: Tensor) -> Tensor:
        """[Q, H] of whole blocks, kernels [Q, K, H] -> [Q, H]."""
        blocks = states.unflatten(0, (-1, self.block_size))
        out = kernel[:, 0] * states
        for tap in range(1, kernel.shape[1]):
            earlier = F.pad(blocks[:, : self.block_size - tap], (0, 0, tap, 0))
            out = out + kernel[:, tap] * earlier.flatten(0, 1)
        return out


class CandidateSelector(nn.Module):
    """<P[a] * (W h), Q[b]>: how well token b follows token a in a slot with state h."""

    def __init__(self, *, hidden_size: int, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank).normal_(std=0.02))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, hidden: Tensor, previous_token_ids: Tensor, candidate_ids: Tensor) -> Tensor:
        """States [..., H], target ids [...] before them and candidates [..., C] (target ids) -> [..., C]."""
        # Sparse: a chunk of the loss touches few rows (as in ``heads.MarkovHead``).
        predecessor = F.embedding(previous_token_ids, self.predecessor_codebook, sparse=True)
        successors = F.embedding(candidate_ids, self.successor_codebook, sparse=True)
        return (successors @ (predecessor * self.hidden_projection(hidden))[..., None]).squeeze(-1)
