"""A folder with the target of ``tiny_world``: what loaders take embedding, norm and head from."""

from pathlib import Path

import torch
from tiny_world import SPEC, target_head
from transformers import LlamaConfig, LlamaForCausalLM


def write_target(folder: Path) -> Path:
    config = LlamaConfig(
        hidden_size=SPEC.hidden_size,
        intermediate_size=SPEC.intermediate_size,
        num_hidden_layers=SPEC.num_layers,
        num_attention_heads=SPEC.num_attention_heads,
        num_key_value_heads=SPEC.num_key_value_heads,
        head_dim=SPEC.head_dim,
        vocab_size=SPEC.vocab_size,
        rms_norm_eps=SPEC.rms_norm_eps,
        tie_word_embeddings=False,
    )
    model, head = LlamaForCausalLM(config), target_head()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(head.embedding)
        model.model.norm.weight.copy_(head.norm_weight)
        model.lm_head.weight.copy_(head.lm_head)
    model.save_pretrained(folder)
    return folder
