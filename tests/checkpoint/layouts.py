"""Checkpoints as other trainers lay them out, written here key by key from their documentation."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_world import build, loss_of, target_head
from torch import Tensor

from dspark_lab.drafter.base import Drafter

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "vocab_size": 29,
    "rope_theta": 100.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention", "full_attention"],
}
OUTPUT_IDS = [-1, 1, 2]  # SPEC.layer_ids, 0 2 3, counted by output
HEADS: dict[str, Any] = {
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DEEPSPEC: dict[str, Any] = {
    **QWEN3,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 4,
    "mask_token_id": 28,
    "target_layer_ids": OUTPUT_IDS,
    "num_target_layers": 4,
    "num_anchors": 512,
}
DEEPSPEC_EAGLE: dict[str, Any] = {
    **QWEN3,
    "architectures": ["Qwen3Eagle3Model"],
    "target_layer_ids": OUTPUT_IDS,
    "num_target_layers": 4,
    "draft_num_hidden_layers": 1,
    "ttt_length": 7,
    "step_loss_decay": 0.8,
}
NESTED: dict[str, Any] = {"mask_token_id": 28, "target_layer_ids": OUTPUT_IDS}
ZLAB: dict[str, Any] = {
    **QWEN3,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 4,
    "num_target_layers": 4,
    "dflash_config": NESTED,
}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
SPECFORGE: dict[str, Any] = {
    **ZLAB,
    "architectures": ["DSparkDraftModel"],
    "dflash_config": {
        **NESTED,
        "projector_type": "dspark",
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    },
}
EAGLE: dict[str, Any] = {
    **QWEN3,
    "architectures": ["LlamaForCausalLM"],  # so its authors' files say
    "model_type": "llama",
    "num_hidden_layers": 1,
    "layer_types": None,
    "draft_vocab_size": 13,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": OUTPUT_IDS},
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}
WINDOW = {"tokens": 6, "origin": "query", "causal": True, "full_layers": (1,)}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # name -> drafter, its options, config.json
    "DeepSpec DSpark": ("dspark", {}, {**DEEPSPEC, **HEADS}),
    "DeepSpec DSpark, gated": ("dspark", {"markov": "gated"}, {**DEEPSPEC, **HEADS, "markov_head_type": "gated"}),
    "DeepSpec DFlash": (
        "dflash",
        {"sample_from_anchor": True},
        {**DEEPSPEC, "markov_rank": 0, "enable_confidence_head": False},
    ),
    "DeepSpec EAGLE-3": ("eagle3", {"num_layers": 1, "qk_norm": True}, DEEPSPEC_EAGLE),
    "z-lab": ("dflash", {}, ZLAB),
    "z-lab, block size inside": (
        "dflash",
        {},
        {**ZLAB, "block_size": None, "dflash_config": {**NESTED, "block_size": 4}},
    ),
    "z-lab, window": ("dflash", {"window": WINDOW}, {**ZLAB, **SLIDING}),
    "z-lab DFlash2": (
        "dflash2",
        {},
        {**ZLAB, "architectures": ["DFlash2DraftModel"], "dflash_config": {**NESTED, **DFLASH2}},
    ),
    "SpecForge DSpark": ("dspark", {"confidence": False}, SPECFORGE),
    "EAGLE": ("eagle3", {"num_layers": 1}, EAGLE),
    "SpecForge EAGLE-3.1": (
        "eagle3",
        {"num_layers": 1, "feature_norm": "layer", "norm_output": True},
        {**EAGLE, "architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": True},
    ),
}


def made(case: str) -> Drafter:
    name, options, config = CASES[case]
    confidence = {"terms": {"ce": 1.0, "confidence": float(options.get("confidence", True))}}
    loss = loss_of(**(confidence if name == "dspark" else {}))
    return build(name, vocabulary="reduced" if "draft_vocab_size" in config else "full", loss=loss, **options)


def written(case: str, folder: Path) -> Drafter:
    """A drafter, and in ``folder`` a checkpoint of it as that trainer would have written it."""
    drafter, config = made(case), CASES[case][2]
    tensors = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    if case.startswith("DeepSpec"):
        tensors |= {"embed_tokens.weight": target_head().embedding, "lm_head.weight": target_head().lm_head}
    if "draft_vocab_size" in config:
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        tensors |= {"d2t": drafter.vocabulary.d2t, "t2d": drafter.vocabulary.t2d, "lm_head.weight": drafter.head_rows}
    if case == "SpecForge DSpark":
        tensors = {f"logit_head.{name}" if name.startswith("markov") else name: t for name, t in tensors.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if case == "EAGLE":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return drafter


def changed(case: str, folder: Path, *, config: dict[str, Any] | None = None, **tensors: Tensor | None) -> str:
    """A checkpoint of ``case`` with other config keys and tensors (None: left out; __ stands for a dot)."""
    written(case, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    file = folder / "model.safetensors"
    held = {**load_file(file), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, file)
    return str(folder)


def emptied(drafter: Drafter) -> Drafter:
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.zero_()
    return drafter
