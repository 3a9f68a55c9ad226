"""Multi-head latent attention as vLLM's ``K3DSparkModel`` computes it, in its parameter names.

Queries and keys/values each pass through a normed latent of low rank:

    q = q_b(norm(q_a(x)))                    per head [q_nope ; q_rope]
    [latent ; k_rope] = kv_a(x),   [k_nope ; v] = kv_b(norm(latent))  per head;   k = [k_nope ; rope(k_rope)]

One ``k_rope`` is shared by all heads. Rotation is of neighbouring numbers (GPT-J style), the scale (nope + rope)^-0.5. Keys
and values have sizes of their own, which ``attend`` takes as they are: nothing is padded. An engine caches latents; here the
cache holds every head's keys and values, so that training and ``propose`` share one interface.
"""

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from dspark_lab.drafter.attention_kinds import LatentAttention
from dspark_lab.drafter.layers import BlockLayer, KeyValue, ProjectedAttention, Rope


class MultiHeadLatentAttention(ProjectedAttention):
    def __init__(self, sizes: LatentAttention, config: Qwen3Config) -> None:
        super().__init__()
        self.sizes = sizes
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.q_a_proj = nn.Linear(hidden, sizes.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(sizes.q_lora_rank, eps=eps)
        self.q_b_proj = nn.Linear(sizes.q_lora_rank, sizes.num_heads * sizes.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, sizes.kv_lora_rank + sizes.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(sizes.kv_lora_rank, eps=eps)
        self.kv_b_proj = nn.Linear(
            sizes.kv_lora_rank, sizes.num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(sizes.num_heads * sizes.v_head_dim, hidden, bias=False)

    def queries(self, states: Tensor, rope: Rope) -> Tensor:
        """[Q, H] -> [Q, Hq, nope + rope]."""
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(states))).unflatten(-1, (self.sizes.num_heads, -1))
        nope, rotated = query.split([self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim], dim=-1)
        return torch.cat([nope, rotate_pairs(rotated, rope)], dim=-1)

    def keys_values(self, states: Tensor, rope: Rope) -> KeyValue:
        """[N, H] -> keys [N, Hq, nope + rope] and values [N, Hq, v]."""
        sizes = self.sizes
        latent, shared = self.kv_a_proj_with_mqa(states).split([sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (sizes.num_heads, -1))
        nope, value = expanded.split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        shared = rotate_pairs(shared[:, None], rope).expand(-1, sizes.num_heads, -1)
        return torch.cat([nope, shared], dim=-1), value


def latent_layer(sizes: LatentAttention, config: Qwen3Config) -> BlockLayer:
    return BlockLayer(config, MultiHeadLatentAttention(sizes, config))


def rotate_pairs(states: Tensor, rope: Rope) -> Tensor:
    """Rotate neighbours (0, 1), (2, 3), ... of heads [N, h, D] by the angles of ``rope``, whose halves are equal."""
    half = states.shape[-1] // 2
    cos, sin = (table[..., :half] for table in rope)
    even, odd = states.unflatten(-1, (half, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(states.dtype)
