"""The speculators format, out and in: what vLLM, SGLang and llama.cpp load (algorithms.md 7.1-7.7).

Layer ids are this project's own convention (states entering a layer), and so are all parameter names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from dspark_lab.checkpoint.description import Description, LayerFacts, formats
from dspark_lab.drafter.base import Drafter

FORMAT_VERSION = "0.9.0"  # of Speculators, whose classes the tests load our files with
_FEATURE_NORMS = {(False, False): None, (True, False): "joint", (False, True): "layer"}


def config_of(description: Description, *, verifier: str, architecture: str, dtype: str) -> dict[str, Any]:
    """Content of ``config.json``. ``verifier``: hub id or folder that loaders take missing tensors from.

    Every key is written: loaders disagree about what a missing one means.
    """
    algorithm, options = description.algorithm, description.options
    known = formats()[algorithm]
    assert description.layer_ids is not None
    config: dict[str, Any] = {
        "architectures": [known.architecture],
        "speculators_model_type": algorithm,
        "speculators_version": FORMAT_VERSION,
        "dtype": dtype,
        "tie_word_embeddings": False,
        "draft_vocab_size": description.draft_vocab_size,
        "target_hidden_size": description.hidden_size,
    }
    if algorithm == "eagle3":
        config |= {
            "eagle_aux_hidden_state_layer_ids": list(description.layer_ids),
            "norm_before_residual": options["norm_before_residual"],
            "norm_before_fc": options["feature_norm"] == "joint",
            "fc_norm": options["feature_norm"] == "layer",
            "norm_output": options["norm_output"],
            "embed_requires_grad": False,
        }
    else:
        window = options["window"]
        config |= {
            "aux_hidden_state_layer_ids": list(description.layer_ids),
            "block_size": options["block_size"],
            "mask_token_id": description.mask_token_id,
            "sample_from_anchor": options["sample_from_anchor"],
            # vLLM's DFlash makes *every* layer causal where this is false, so full attention needs true.
            "sliding_window_non_causal": window is None or not window["causal"],
            **{key: options[key] for key in known.own_keys},
        }
    if algorithm == "dspark":
        config |= {
            "markov_rank": options["markov_rank"] if options["markov"] else 0,
            "markov_head_type": options["markov"] or "vanilla",
            "enable_confidence_head": options["confidence"],
            "confidence_head_with_markov": options["markov"] is not None,
        }
    return {
        **config,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": description.num_draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": [architecture]},
        },
        "transformer_layer_config": _layer_config(description),
    }


def _layer_config(description: Description) -> dict[str, Any]:
    """RoPE is written in the spelling of transformers 4 and 5; the head size always, as EAGLE-3's loader guesses it."""
    options, layers, window = description.options, description.layers, description.options["window"]
    rope = dict(layers.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    qwen3 = options.get("qk_norm", True)
    config: dict[str, Any] = {
        "model_type": "qwen3" if qwen3 else "llama",
        "hidden_size": description.hidden_size,
        "intermediate_size": options["intermediate_size"],
        "num_hidden_layers": options["num_layers"],
        "num_attention_heads": layers.num_attention_heads,
        "num_key_value_heads": layers.num_key_value_heads,
        "head_dim": layers.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layers.rms_norm_eps,
        "max_position_embeddings": layers.max_position_embeddings,
        "initializer_range": 0.02,
        "vocab_size": description.vocab_size,
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": scaling if rope.get("rope_type", "default") != "default" else None,
        "rope_parameters": rope,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "layer_types": [
            "sliding_attention" if window is not None and layer not in window["full_layers"] else "full_attention"
            for layer in range(options["num_layers"])
        ],
        "sliding_window": None if window is None else window["tokens"],
        "use_sliding_window": window is not None,
    }
    if not qwen3:
        config["mlp_bias"] = False
    if description.algorithm == "eagle3":
        # vLLM 0.32 assumes three captured layers where this is missing; Speculators does not read it.
        config["num_aux_hidden_states"] = len(description.layer_ids or ())
    if description.algorithm == "dspark" and window is not None and not window["causal"]:
        # vLLM 0.32 does not pass sliding_window_non_causal on for DSpark, but reads this.
        config["is_causal"] = False
    return config


def tensors_of(drafter: Drafter, *, dtype: torch.dtype, include_target_tensors: bool) -> dict[str, Tensor]:
    """Content of ``model.safetensors``, on the CPU.

    A reduced vocabulary brings its rows of the head and its maps; with the full one loaders take embedding and head from
    the target, unless they are asked for here. EAGLE-3 always has both: Speculators 0.9 leaves whatever lay in memory
    where its class misses them.
    """
    tensors = {name: tensor.to(dtype) for name, tensor in drafter.state_dict().items()}
    standalone = include_target_tensors or drafter.chained
    if standalone:
        tensors["embed_tokens.weight"] = drafter.target_head.embedding.to(dtype)
    if standalone or not drafter.vocabulary.is_full:
        tensors["lm_head.weight"] = drafter.head_rows.to(dtype)
    if not drafter.vocabulary.is_full:
        tensors |= {"t2d": drafter.vocabulary.t2d, "d2t": drafter.vocabulary.d2t}
    # A copy: safetensors refuses tensors that share memory, as tied matrices do.
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def from_config(config: Mapping[str, Any]) -> Description:
    """Inverse of ``config_of``, for files of Speculators too, which leave out what equals a default of its classes.

    Raises:
        ValueError: an algorithm or an option that no drafter here has.
    """
    algorithm = config["speculators_model_type"]
    known = formats()
    if algorithm not in known:
        raise ValueError(
            f"speculators_model_type={algorithm!r}: only {', '.join(sorted(known))} can be read, and what drafter=... names"
        )
    config = {**known[algorithm].own_keys, **config}
    required(config, "transformer_layer_config", "speculators_config")
    values = config["transformer_layer_config"]
    layers = read_layers(values, default_type="qwen3")
    common = {"num_layers": layers.num_hidden_layers, "intermediate_size": layers.intermediate_size}
    window = read_window(layers)
    if algorithm == "eagle3":
        norms = bool(config.get("norm_before_fc")), bool(config.get("fc_norm"))
        if norms not in _FEATURE_NORMS:
            raise ValueError("norm_before_fc and fc_norm are both true: one of them at most")
        options = {
            **common,
            "feature_norm": _FEATURE_NORMS[norms],
            "norm_before_residual": bool(config.get("norm_before_residual", False)),
            "norm_output": bool(config.get("norm_output", False)),
            "qk_norm": layers.model_type == "qwen3",
            "window": window,
        }
        layer_ids = config.get("eagle_aux_hidden_state_layer_ids")
    else:
        required(config, "block_size", "aux_hidden_state_layer_ids", "mask_token_id")
        options = {
            **common,
            "block_size": config["block_size"],
            "sample_from_anchor": bool(config.get("sample_from_anchor", algorithm == "dspark")),
            "window": window and {**window, "causal": not config.get("sliding_window_non_causal", False)},
        }
        options |= {key: config[key] for key in known[algorithm].own_keys}
        layer_ids = config["aux_hidden_state_layer_ids"]
    if algorithm == "dspark":
        options |= read_heads({"markov_rank": 256, "enable_confidence_head": True, **config})
    verifier = config["speculators_config"].get("verifier") or {}
    methods = config["speculators_config"].get("proposal_methods") or [{}]
    return Description(
        algorithm=algorithm,
        options=options,
        num_draft_tokens=methods[0].get("speculative_tokens", 1),
        layer_ids=None if layer_ids is None else tuple(layer_ids),
        mask_token_id=config.get("mask_token_id"),
        hidden_size=layers.hidden_size,
        vocab_size=layers.vocab_size,
        draft_vocab_size=config.get("draft_vocab_size") or layers.vocab_size,
        layers=layer_facts(layers),
        verifier=verifier.get("name_or_path"),
    )


def read_layers(values: Mapping[str, Any], *, default_type: str) -> Any:
    """The decoder layers' config with the defaults of its Transformers class.

    Raises:
        ValueError: layers that no drafter here has.
    """
    model_type = values.get("model_type") or default_type
    if model_type not in ("qwen3", "llama"):
        raise ValueError(f"model_type={model_type!r}: only layers of qwen3 and llama can be read")
    kept = {key: value for key, value in values.items() if key not in ("model_type", "architectures", "auto_map")}
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **kept)
    unknown = {
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "is_neox_style": (True, None),
        "rope_interleave": (False, None),
        "input_embedding_scale": (1.0, None),
        "final_logit_softcapping": (None,),
    }
    for key, known in unknown.items():
        found = getattr(config, key, known[-1])
        if found not in known:
            raise ValueError(f"{key}={found!r}: drafters here have {key}={known[0]} only")
    return config


def layer_facts(layers: Any) -> LayerFacts:
    rope = {key: value for key, value in (layers.rope_parameters or {}).items() if value is not None}
    return LayerFacts(
        layers.num_attention_heads,
        layers.num_key_value_heads or layers.num_attention_heads,
        getattr(layers, "head_dim", None) or layers.hidden_size // layers.num_attention_heads,
        layers.rms_norm_eps,
        rope,
        layers.max_position_embeddings,
    )


def read_window(layers: Any) -> dict[str, Any] | None:
    """Tokens and full layers of a window; None where no layer slides."""
    types: Sequence[str] = getattr(layers, "layer_types", None) or []
    if "sliding_attention" not in types:
        return None
    tokens = layers.sliding_window
    if not tokens:
        raise ValueError(
            "layer_types has sliding_attention, but sliding_window is null or use_sliding_window false: the window's length "
            "is unknown"
        )
    return {"tokens": tokens, "full_layers": [layer for layer, kind in enumerate(types) if kind == "full_attention"]}


def read_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """DSpark's two heads; the keys are the same in every format."""
    rank = int(config.get("markov_rank") or 0)
    confidence = bool(config.get("enable_confidence_head", False))
    if confidence and bool(config.get("confidence_head_with_markov", rank > 0)) != (rank > 0):
        raise ValueError(
            f"confidence_head_with_markov={config.get('confidence_head_with_markov')} with markov_rank={rank}: confidence "
            "heads here see the Markov embedding exactly where there is one"
        )
    return {
        "markov": config.get("markov_head_type", "vanilla") if rank else None,
        "markov_rank": rank,
        "confidence": confidence,
    }


def required(config: Mapping[str, Any], *keys: str) -> None:
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
