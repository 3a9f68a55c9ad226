"""vLLM's own format of DSpark with latent attention, out and in: ``model_type: k3_dspark``, architecture ``K3DSparkModel``.

Read in the sources of vLLM 0.32 (``transformers_utils/configs/k3_dspark.py``, ``models/kimi_k3/nvidia/dspark_mla.py``).
Layer ids count by output there, one less than here, and ``num_target_layers`` is how many of them there are.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dspark_lab.checkpoint.description import Description, LayerFacts
from dspark_lab.checkpoint.speculators import read_heads, required
from dspark_lab.drafter.attention_kinds import LatentAttention

ARCHITECTURE = "K3DSparkModel"
_SIZES = {"num_heads": "num_attention_heads"} | {
    name: name for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
}
_THEIRS = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}
_OURS = {theirs: ours for ours, theirs in _THEIRS.items()}
_DEFAULT_THETA = 50000.0  # of its config class


def unwritable(algorithm: str, options: Mapping[str, Any], *, reduced: bool) -> list[str]:
    """What of a drafter with latent attention the format cannot hold, one sentence each with the mend.

    ``options``: as the config's ``drafter`` node has them; ``reduced``: it has a draft vocabulary.
    """
    if algorithm != "dspark":
        return [
            f"{algorithm} with latent attention: no engine's format holds it; use drafter=dspark, an attention without "
            "kv_lora_rank, or leave export out of stages"
        ]
    said = []
    if reduced:
        said.append(
            "latent attention with a draft vocabulary: k3_dspark has the target's; set data.draft_vocab_size=null"
        )
    if options["markov"] != "vanilla":
        said.append(
            f"latent attention with markov={options['markov'] or 'null'}: k3_dspark always has the vanilla Markov head; set "
            "drafter.markov=vanilla"
        )
    if options["window"] is not None:
        said.append("latent attention with a window: k3_dspark attends to the whole context; set drafter.window=null")
    return said


def config_of(description: Description, *, dtype: str) -> dict[str, Any]:
    """Content of ``config.json``. ValueError for what the format cannot hold."""
    options, layers, latent = description.options, description.layers, description.latent
    reduced = description.draft_vocab_size != description.vocab_size
    if said := unwritable(description.algorithm, options, reduced=reduced):
        raise ValueError("; ".join(said))
    assert latent is not None and description.layer_ids is not None
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "k3_dspark",
        "dtype": dtype,
        "vocab_size": description.vocab_size,
        "draft_vocab_size": description.draft_vocab_size,
        "hidden_size": description.hidden_size,
        "target_hidden_size": description.hidden_size,
        "target_layer_ids": [layer - 1 for layer in description.layer_ids],
        "num_target_layers": len(description.layer_ids),
        "num_hidden_layers": options["num_layers"],
        "intermediate_size": options["intermediate_size"],
        "hidden_act": "silu",
        **{theirs: getattr(latent, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": latent.num_heads,
        "rope_parameters": dict(latent.rope_parameters),
        "max_position_embeddings": layers.max_position_embeddings,
        "rms_norm_eps": layers.rms_norm_eps,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": options["block_size"],
        "mask_token_id": description.mask_token_id,
        "sample_from_anchor": options["sample_from_anchor"],
        "markov_rank": options["markov_rank"],
        "markov_head_type": "vanilla",
        "enable_confidence_head": options["confidence"],
        "confidence_head_with_markov": True,
    }


def to_theirs(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the format's names."""
    return {_renamed(name, _THEIRS): tensor for name, tensor in tensors.items()}


def to_our_name(name: str) -> str:
    return _renamed(name, _OURS)


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    found = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes.get(found, "") + name.removeprefix(found)


def from_config(config: Mapping[str, Any]) -> Description:
    """Inverse of ``config_of``. ValueError for a key that is missing or an option that no drafter here has."""
    required(config, *_SIZES.values(), "target_layer_ids", "num_hidden_layers", "intermediate_size", "hidden_size")
    required(config, "vocab_size", "block_size", "mask_token_id", "rms_norm_eps", "max_position_embeddings")
    odd = [key for key in ("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm") if config.get(key)]
    if odd or config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{', '.join(odd) or 'hidden_act'}: latent layers here have none of it, and SiLU")
    rope = dict(config.get("rope_parameters") or {})
    rope = {"rope_type": "default", "rope_theta": config.get("rope_theta", _DEFAULT_THETA), **rope}
    sizes = {ours: config[theirs] for ours, theirs in _SIZES.items()}
    latent = LatentAttention(**sizes, rope_parameters=rope)
    anchor_first = bool(config.get("sample_from_anchor", True))
    return Description(
        algorithm="dspark",
        options={
            "num_layers": config["num_hidden_layers"],
            "intermediate_size": config["intermediate_size"],
            "block_size": config["block_size"],
            "sample_from_anchor": anchor_first,
            "window": None,
            **read_heads(config),
        },
        num_draft_tokens=config["block_size"] - (not anchor_first),
        layer_ids=tuple(layer + 1 for layer in config["target_layer_ids"]),
        mask_token_id=config["mask_token_id"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["vocab_size"],
        layers=LayerFacts(
            latent.num_heads,
            latent.num_heads,
            latent.qk_rope_head_dim,
            config["rms_norm_eps"],
            rope,
            config["max_position_embeddings"],
        ),
        latent=latent,
    )
