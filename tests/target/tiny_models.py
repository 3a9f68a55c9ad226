"""Random models of a few thousand parameters with a byte tokenizer and a ChatML template, saved as ordinary folders."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3NextConfig

PAD, START, END = 256, 257, 258  # the tokenizer's vocabulary ends here; the embedding has 272 rows
NUM_ROWS = 272
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": NUM_ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large enough that answers are not one repeated token
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": END,
}

HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "initializer_range": 0.1,  # their layers enlarge rounding errors more
}


def save_tokenizer(folder: Path) -> None:
    """256 bytes and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|pad|>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def save_model(folder: Path, architecture: str, **changes: Any) -> Path:
    """ "qwen3" (untied), "llama" (tied embeddings), "qwen3_sliding" (a window of 4 on every layer), or "qwen3_next" (linear
    attention in every other layer).
    """
    sizes = SIZES | changes
    if architecture == "llama":
        config = LlamaConfig(**sizes, tie_word_embeddings=True)
    elif architecture == "qwen3":
        config = Qwen3Config(**sizes, tie_word_embeddings=False)
    elif architecture == "qwen3_next":
        config = Qwen3NextConfig(**sizes | HYBRID, mlp_only_layers=list(range(8)))
    else:
        layer_types = ["sliding_attention"] * sizes["num_hidden_layers"]
        config = Qwen3Config(
            **sizes, tie_word_embeddings=False, sliding_window=4, use_sliding_window=True, layer_types=layer_types
        )
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder
