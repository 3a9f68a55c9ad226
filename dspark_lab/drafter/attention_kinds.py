"""The two kinds of attention that a drafter's layers can have where it is not the target's: grouped heads and latents."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from dspark_lab.records import TargetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Heads and rotary positions of a drafter's layers where they are not the target's.

    ``rope_parameters`` as Transformers writes them: {rope_type: default, rope_theta: 10000.0}.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_parameters: Mapping[str, Any]

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_dim) < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"attention: num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}, and "
                f"head_dim={self.head_dim} positive"
            )

    def instead_of(self, target: TargetSpec) -> TargetSpec:
        """The target as layers with this attention see it."""
        return replace(
            target,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope_parameters=dict(self.rope_parameters),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (``mla.py``): sizes of its latents and heads, and rotary positions.

    ``rope_parameters``: *default*, or *yarn* without keys that scale anything but cos and sin.
    """

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_parameters: Mapping[str, Any]

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in self.__slots__ if name != "rope_parameters"}
        if min(sizes.values()) < 1 or self.qk_rope_head_dim % 2:
            raise ValueError(f"attention: {sizes} must be positive, and qk_rope_head_dim even: it is rotated in pairs")
        kind = self.rope_parameters.get("rope_type", "default")
        odd = {"mscale", "mscale_all_dim", "attention_factor", "partial_rotary_factor"} & self.rope_parameters.keys()
        if kind not in ("default", "yarn") or odd:
            raise ValueError(
                f"attention.rope_parameters: rope_type={kind} with {sorted(odd) or 'no further key'}; latent attention has "
                "default and yarn, and none of mscale, mscale_all_dim, attention_factor, partial_rotary_factor"
            )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def instead_of(self, target: TargetSpec) -> TargetSpec:
        """The target as layers with this attention see it: ``head_dim`` is what is rotated of a head."""
        return replace(
            target,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            head_dim=self.qk_rope_head_dim,
            rope_parameters=dict(self.rope_parameters),
        )


def is_latent(attention: Any) -> bool:
    """Whether ``drafter.attention``, as a mapping or built, is latent."""
    return isinstance(attention, LatentAttention) or (isinstance(attention, Mapping) and "kv_lora_rank" in attention)


NO_LATENTS = (
    "attention with kv_lora_rank is latent, which only the layers of dflash and dspark can be: give num_heads, "
    "num_kv_heads, head_dim and rope_parameters, or null"
)

AnyAttention = Annotated[
    Annotated[Attention, Tag("grouped")] | Annotated[LatentAttention, Tag("latent")],
    Discriminator(lambda attention: "latent" if is_latent(attention) else "grouped"),
]
"""Which one follows from the keys that are given."""
