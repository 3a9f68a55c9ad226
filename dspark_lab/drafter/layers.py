"""Decoder layers of drafters, with the parameter names of Qwen3/Llama layers and of the speculators format."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RotaryEmbedding, rotate_half

from dspark_lab.drafter.attention import Visibility, attend
from dspark_lab.records import TargetSpec

KeyValue = tuple[Tensor, Tensor]  # keys [N, Hkv, D] and values [N, Hkv, D], of latent attention [N, Hkv, Dv]
Rope = tuple[Tensor, Tensor]  # cos and sin, each [N, 1, D]


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Layers that see the last ``tokens`` states only; those in ``full_layers`` see all.

    ``origin``: the window ends at the *anchor* for all slots of a block or steps of a chain (Speculators trains so), or at
    each *query* (engines serve so, and ``propose`` always does). ``causal``: within a block, slots see earlier ones only.
    """

    tokens: int
    origin: Literal["anchor", "query"]
    causal: bool
    full_layers: tuple[int, ...]

    def check(self, *, num_layers: int, least: int) -> None:
        """ValueError for a window that has no layer, names one that is not there, or is shorter than ``least``."""
        if self.tokens < least:
            raise ValueError(
                f"window.tokens={self.tokens}: must be at least {least}, the slots that are drafted at once"
            )
        if not all(0 <= layer < num_layers for layer in self.full_layers) or len(set(self.full_layers)) >= num_layers:
            raise ValueError(
                f"window.full_layers={list(self.full_layers)} of num_layers={num_layers}: name some of 0..{num_layers - 1}, "
                "not all (window=null for none)"
            )


def visible_by_layer(
    window: SlidingWindow | None, full: Visibility, *, ahead: Tensor | int, num_layers: int
) -> list[Visibility]:
    """What the queries of each layer see: everything, or the window; ``ahead`` as in ``Visibility.within``."""
    if window is None:
        return [full] * num_layers
    inside = full.within(window.tokens, ahead=ahead, causal=window.causal)
    return [full if layer in window.full_layers else inside for layer in range(num_layers)]


def layer_config(target: TargetSpec, *, num_layers: int, intermediate_size: int | None = None) -> Qwen3Config:
    """Layers with the target's width, epsilon and context, and with the heads and RoPE that ``target`` shows them.

    Raises ValueError where the target has none that a drafter's layer could have, and the drafter names none.
    """
    if not target.num_attention_heads or not (intermediate_size or target.intermediate_size):
        raise ValueError(
            f"the layers of target {target.name} are of another kind than a drafter's: set drafter.attention and "
            "drafter.intermediate_size"
        )
    return Qwen3Config(
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters=dict(target.rope_parameters),
        vocab_size=target.vocab_size,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=False,
    )


class Rotary(nn.Module):
    """Rotary table (neox style, any RoPE scaling that Transformers knows) at given positions."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.table = Qwen3RotaryEmbedding(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        # A cast of the drafter must not round the frequencies: in bf16, position 2000 would be off by radians.
        exact = dict(self.table.named_buffers())
        super()._apply(fn, recurse)
        for name, frequencies in exact.items():
            setattr(self.table, name, frequencies.to(getattr(self.table, name).device))
        return self

    def forward(self, position_ids: Tensor) -> Rope:
        """[N] positions -> cos and sin, each fp32 [N, 1, D]."""
        cos, sin = self.table(self.table.inv_freq, position_ids[None])
        return cos[0, :, None], sin[0, :, None]


def rotate(states: Tensor, rope: Rope) -> Tensor:
    """Rotate heads [N, h, D]."""
    cos, sin = rope
    return (states * cos + rotate_half(states) * sin).to(states.dtype)


class ProjectedAttention(nn.Module):
    """An attention layer whose queries and keys may come from different inputs."""

    o_proj: nn.Linear

    @abstractmethod
    def queries(self, states: Tensor, rope: Rope) -> Tensor:
        """[Q, input] -> [Q, Hq, D]."""

    @abstractmethod
    def keys_values(self, states: Tensor, rope: Rope) -> KeyValue:
        """[N, input] -> keys and values."""

    def forward(self, query: Tensor, context: KeyValue, own: Sequence[KeyValue], visibility: Visibility) -> Tensor:
        return self.o_proj(attend(query, context, own, visibility).flatten(1))


class DraftAttention(ProjectedAttention):
    """Grouped heads, as those of Qwen3 and Llama."""

    def __init__(self, config: Qwen3Config, *, input_size: int, qk_norm: bool) -> None:
        super().__init__()
        assert config.num_key_value_heads is not None
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, key_size, bias=False)
        self.v_proj = nn.Linear(input_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps) if qk_norm else nn.Identity()

    def queries(self, states: Tensor, rope: Rope) -> Tensor:
        """[Q, input] -> [Q, Hq, D]."""
        return rotate(self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.head_dim))), rope)

    def keys_values(self, states: Tensor, rope: Rope) -> KeyValue:
        """[N, input] -> keys and values, each [N, Hkv, D]."""
        key = rotate(self.k_norm(self.k_proj(states).unflatten(-1, (-1, self.head_dim))), rope)
        return key, self.v_proj(states).unflatten(-1, (-1, self.head_dim))


class BlockLayer(nn.Module):
    """A decoder layer over block slots that also attends to context states, which bypass ``input_layernorm``.

    ``attention`` None: grouped heads, as ``config`` has them.
    """

    def __init__(self, config: Qwen3Config, attention: ProjectedAttention | None = None) -> None:
        super().__init__()
        grouped = attention is None
        self.self_attn = DraftAttention(config, input_size=config.hidden_size, qk_norm=True) if grouped else attention
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, states: Tensor, rope: Rope, context: KeyValue, visibility: Visibility) -> Tensor:
        """states [Q, H], context keys and values [N, Hkv, D] -> [Q, H]."""
        normed = self.input_layernorm(states)
        query = self.self_attn.queries(normed, rope)
        own = [self.self_attn.keys_values(normed, rope)]
        states = states + self.self_attn(query, context, own, visibility)
        return states + self.mlp(self.post_attention_layernorm(states))


class ChainLayer(nn.Module):
    """EAGLE-3's decoder layer. The first one takes the pair (token embedding, hidden state), the others hidden states.

    ``qk_norm``: norms on queries and keys (Qwen3) or none (Llama). ``norm_before_residual``: the first layer's residual is
    the normed hidden state.
    """

    def __init__(self, config: Qwen3Config, *, first: bool, qk_norm: bool, norm_before_residual: bool) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn = DraftAttention(config, input_size=2 * size if first else size, qk_norm=qk_norm)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        if first:
            self.hidden_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.first, self.norm_before_residual = first, norm_before_residual

    def inputs(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the projections see, [N, 2H] in the first layer (embedding first), else [N, H]; and the residual [N, H]."""
        if not self.first:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        inputs = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return inputs, normed if self.norm_before_residual else hidden

    def forward(
        self,
        inputs: Tensor,
        residual: Tensor,
        rope: Rope,
        context: KeyValue,
        own: Sequence[KeyValue],
        visibility: Visibility,
    ) -> Tensor:
        """``inputs`` and ``residual`` as made by ``inputs()`` -> [Q, H]."""
        states = residual + self.self_attn(self.self_attn.queries(inputs, rope), context, own, visibility)
        return states + self.mlp(self.post_attention_layernorm(states))


def initialise(module: nn.Module, *, std: float = 0.02, skip: Sequence[nn.Module] = ()) -> None:
    """Linear and embedding weights ~ N(0, std), biases 0, norms 1: what Transformers gives a Qwen3 model.

    Modules in ``skip`` keep torch's own initialisation.
    """
    skipped = {part for other in skip for part in other.modules()}
    for part in module.modules():
        if part in skipped:
            continue
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
