"""A drafter's architecture in the words of this project, whatever file it was read from or will be written to."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from dspark_lab.drafter.attention_kinds import LatentAttention
from dspark_lab.drafter.base import Drafter
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.dflash import DFlash  # noqa: F401 (known by being imported)
from dspark_lab.drafter.dspark import DSpark
from dspark_lab.drafter.eagle3 import Eagle3
from dspark_lab.drafter.format import CheckpointFormat
from dspark_lab.drafter.layers import SlidingWindow
from dspark_lab.records import TargetSpec


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What a drafter's layers have of their own in a checkpoint; drafters trained here have their target's."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    max_position_embeddings: int

    @classmethod
    def of(cls, spec: TargetSpec) -> "LayerFacts":
        return cls(
            spec.num_attention_heads,
            spec.num_key_value_heads,
            spec.head_dim,
            spec.rms_norm_eps,
            dict(spec.rope_parameters),
            spec.max_position_embeddings,
        )

    def seen_by(self, spec: TargetSpec) -> TargetSpec:
        """The target as these layers see it: its own facts, but for heads, epsilon and RoPE. Its context stays."""
        return replace(
            spec,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope_parameters),
        )


@dataclass(frozen=True, slots=True)
class Description:
    """What a drafter is.

    ``algorithm`` is the name of its ``CheckpointFormat``; ``options`` have the keys of its YAML in ``conf/drafter`` that
    shape the network, with their values there.
    ``layer_ids`` are entering-layer ids (states *entering* these target layers); None: the file leaves them to the
    default. ``num_target_layers`` and ``verifier`` name the target where the file does; ``num_draft_tokens`` is what it
    proposes by default. ``latent``: of its layers, None where their attention has grouped heads.
    """

    algorithm: str
    options: Mapping[str, Any]
    num_draft_tokens: int
    layer_ids: tuple[int, ...] | None
    mask_token_id: int | None
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layers: LayerFacts
    num_target_layers: int | None = None
    verifier: str | None = None
    latent: LatentAttention | None = None


def formats() -> Mapping[str, CheckpointFormat]:
    """Of all drafter classes that have been imported, by name."""
    return {found.name: found for cls in _derived(Drafter) if (found := _own_format(cls)) is not None}


def format_of(drafter_class: type) -> CheckpointFormat:
    """ValueError for a class that says none; a subclass may hold what its parent's format does not."""
    found = _own_format(drafter_class)
    if found is None:
        raise ValueError(
            f"{drafter_class.__name__} has no checkpoint format (there are: {', '.join(sorted(formats()))}): leave export "
            "out of stages, or give the class a checkpoint_format"
        )
    return found


def _own_format(drafter_class: type) -> CheckpointFormat | None:
    return vars(drafter_class).get("checkpoint_format")


def _derived(cls: type) -> Iterator[type]:
    for derived in cls.__subclasses__():
        yield derived
        yield from _derived(derived)


def describe(drafter: Drafter) -> Description:
    """What a checkpoint says of ``drafter``. ValueError for a class that no format knows."""
    known = format_of(type(drafter))
    target = drafter.target
    return Description(
        algorithm=known.name,
        options=_chain_options(drafter) if isinstance(drafter, Eagle3) else _block_options(drafter, known),
        num_draft_tokens=drafter.num_draft_tokens,
        layer_ids=tuple(target.layer_ids),
        mask_token_id=None if drafter.chained else target.mask_token_id,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=drafter.vocabulary.size,
        layers=LayerFacts.of(target),
        num_target_layers=target.num_layers,
        latent=drafter.latent if isinstance(drafter, BlockDrafter) else None,
    )


def window_option(window: SlidingWindow | None, *, causal: bool = True) -> dict[str, Any] | None:
    """The part of ``drafter.window`` that a checkpoint knows; ``causal=False`` where the algorithm has no such flag."""
    if window is None:
        return None
    known: dict[str, Any] = {"tokens": window.tokens, "full_layers": list(window.full_layers)}
    return {**known, "causal": window.causal} if causal else known


def _chain_options(drafter: Eagle3) -> dict[str, Any]:
    first = drafter.layers[0]
    return {
        "num_layers": len(drafter.layers),
        "intermediate_size": first.mlp.intermediate_size,
        "feature_norm": drafter.feature_norm,
        "norm_before_residual": first.norm_before_residual,
        "norm_output": drafter.norm_output,
        "qk_norm": isinstance(first.self_attn.q_norm, nn.RMSNorm),
        "window": window_option(drafter.window_attention, causal=False),
    }


def _block_options(drafter: Drafter, known: CheckpointFormat) -> dict[str, Any]:
    assert isinstance(drafter, BlockDrafter)
    options = {
        "num_layers": len(drafter.layers),
        "intermediate_size": drafter.layers[0].mlp.intermediate_size,
        "block_size": drafter.block_size,
        "sample_from_anchor": drafter.sample_from_anchor,
        "window": window_option(drafter.window_attention),
        **{key: getattr(drafter, key) for key in known.own_keys},
    }
    if isinstance(drafter, DSpark):
        head = drafter.markov_head
        options |= {
            "markov": head.kind if head else None,
            "markov_rank": head.rank if head else 0,
            "confidence": drafter.confidence_head is not None,
        }
    return options
