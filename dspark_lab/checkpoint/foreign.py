"""Checkpoints of other trainers, in: DeepSpec, z-lab, SpecForge, EAGLE (algorithms.md 7.8, 7.9) and vLLM's own.

All of them count layers by output (id i is the output of decoder layer i): one less than here (0.4).
"""

from collections.abc import Callable, Mapping
from typing import Any

from dspark_lab.checkpoint import k3_dspark
from dspark_lab.checkpoint.description import Description
from dspark_lab.checkpoint.speculators import layer_facts, read_heads, read_layers, read_window, required

_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_SCALES = {
    "input_embedding_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None, 0.0),
}


def entering(output_ids: Any) -> tuple[int, ...]:
    """Output-of-layer ids -> entering-layer ids: [1, 9] -> [2, 10]; -1, the embedding's output, -> 0."""
    return tuple(layer + 1 for layer in output_ids)


def from_deepspec(config: Mapping[str, Any]) -> Description:
    """Qwen3DSparkModel: DSpark, and DeepSpec's own DFlash, which is the same without heads; anchor-first both."""
    required(config, "block_size", "mask_token_id", "target_layer_ids")
    heads = read_heads(config)
    plain = heads["markov"] is None and not heads["confidence"]
    return _block_drafter(
        config,
        {**config, "sample_from_anchor": True},
        "dflash" if plain else "dspark",
        {} if plain else heads,
    )


def from_deepspec_eagle3(config: Mapping[str, Any]) -> Description:
    """Qwen3Eagle3Model: a Qwen3 layer, no norm on the features, un-normed residual and feedback, full vocabulary."""
    required(config, "target_layer_ids")
    num_layers = config.get("draft_num_hidden_layers") or config["num_hidden_layers"]
    values = {key: value for key, value in config.items() if key != "layer_types"}
    layers = read_layers({**values, "num_hidden_layers": num_layers}, default_type="qwen3")
    return _chain_drafter(
        config,
        layers,
        qk_norm=True,
        layer_ids=entering(config["target_layer_ids"]),
        draft_vocab_size=layers.vocab_size,
    )


def from_dflash_config(config: Mapping[str, Any]) -> Description:
    """DFlashDraftModel of z-lab and SpecForge (1 + N), z-lab's DFlash2DraftModel, and SpecForge's DSparkDraftModel."""
    nested = config.get("dflash_config") or {}
    merged = {**nested, "block_size": config.get("block_size") or nested.get("block_size")}
    required(merged, "block_size", "mask_token_id", "target_layer_ids")
    dspark = config["architectures"][0] == "DSparkDraftModel"
    kind = nested.get("projector_type", "dspark" if dspark else "dflash")
    if kind != ("dspark" if dspark else "dflash"):
        raise ValueError(f"dflash_config.projector_type={kind!r}: only dflash and dspark can be read")
    for key, plain in _SCALES.items():
        if nested.get(key) not in plain:
            raise ValueError(f"dflash_config.{key}={nested[key]!r}: drafters here scale neither embeddings nor logits")
    if any(nested.get(key) for key in _DFLASH2_KEYS):
        required(nested, *_DFLASH2_KEYS)
        convolved = {key: nested[key] for key in _DFLASH2_KEYS}
        return _block_drafter(config, {**merged, "sample_from_anchor": False}, "dflash2", convolved)
    return _block_drafter(
        config,
        {**merged, "sample_from_anchor": dspark},
        "dspark" if dspark else "dflash",
        read_heads(merged) if dspark else {},
    )


def from_midlayer(config: Mapping[str, Any]) -> Description:
    """EAGLE-3 of its authors and of SpecForge: a Llama layer called ``midlayer``, a head of its own, mostly 32000 tokens."""
    layers = read_layers({**config, "layer_types": None}, default_type="llama")
    output_ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return _chain_drafter(
        config,
        layers,
        qk_norm=layers.model_type == "qwen3",
        layer_ids=None if output_ids is None else entering(output_ids),
        draft_vocab_size=config.get("draft_vocab_size") or layers.vocab_size,
    )


def rename_midlayer(name: str) -> str:
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def rename_logit_head(name: str) -> str:
    """Older SpecForge files keep both heads below ``logit_head.``."""
    return name.removeprefix("logit_head.")


def _block_drafter(
    config: Mapping[str, Any], own: Mapping[str, Any], algorithm: str, beyond: Mapping[str, Any]
) -> Description:
    """``config`` describes the layers, ``own`` the drafter; ``beyond`` are the options that not all block drafters have."""
    layers = read_layers(config, default_type="qwen3")
    window, causal = read_window(layers), getattr(layers, "is_causal", None)
    if window is None and causal:
        raise ValueError("is_causal=true with full attention: drafters here see their whole block in such layers")
    options = {
        "num_layers": layers.num_hidden_layers,
        "intermediate_size": layers.intermediate_size,
        "block_size": own["block_size"],
        "sample_from_anchor": own["sample_from_anchor"],
        "window": window and {**window, "causal": causal is None or bool(causal)},
    }
    return Description(
        algorithm=algorithm,
        options={**options, **beyond},
        num_draft_tokens=own["block_size"] - (not own["sample_from_anchor"]),
        layer_ids=entering(own["target_layer_ids"]),
        mask_token_id=own["mask_token_id"],
        hidden_size=layers.hidden_size,
        vocab_size=layers.vocab_size,
        draft_vocab_size=layers.vocab_size,
        layers=layer_facts(layers),
        num_target_layers=config.get("num_target_layers"),
    )


def _chain_drafter(
    config: Mapping[str, Any],
    layers: Any,
    *,
    qk_norm: bool,
    layer_ids: tuple[int, ...] | None,
    draft_vocab_size: int,
) -> Description:
    joint, layer = bool(config.get("norm_before_fc")), bool(config.get("fc_norm"))
    return Description(
        algorithm="eagle3",
        options={
            "num_layers": layers.num_hidden_layers,
            "intermediate_size": layers.intermediate_size,
            "feature_norm": "joint" if joint else "layer" if layer else None,
            "norm_before_residual": bool(config.get("norm_before_residual", False)),
            "norm_output": bool(config.get("norm_output", False)),
            "qk_norm": qk_norm,
            "window": None,
        },
        num_draft_tokens=config.get("ttt_length", 3),
        layer_ids=layer_ids,
        mask_token_id=None,
        hidden_size=layers.hidden_size,
        vocab_size=layers.vocab_size,
        draft_vocab_size=draft_vocab_size,
        layers=layer_facts(layers),
        num_target_layers=config.get("num_target_layers"),
        verifier=config.get("target_model_name_or_path"),
    )


READERS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Description], Callable[[str], str] | None]] = {
    "Qwen3DSparkModel": ("DeepSpec", from_deepspec, None),
    "Qwen3Eagle3Model": ("DeepSpec", from_deepspec_eagle3, None),
    "DFlashDraftModel": ("z-lab", from_dflash_config, None),
    "DFlash2DraftModel": ("z-lab", from_dflash_config, None),
    "DSparkDraftModel": ("SpecForge", from_dflash_config, rename_logit_head),
    k3_dspark.ARCHITECTURE: ("vLLM", k3_dspark.from_config, k3_dspark.to_our_name),
    "LlamaForCausalLMEagle3": ("EAGLE", from_midlayer, rename_midlayer),
}
"""Architecture named in config.json -> format, reader of the config, and how its parameters are renamed."""
