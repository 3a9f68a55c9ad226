"""The cached forward of one sequence that speculative decoding verifies with, and its rollback."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from dspark_lab.target.anatomy import dissect, recording, skeleton
from dspark_lab.target.protocol import VerifyOutput


class HuggingFaceVerifier:
    """A transformers model with a cache for one sequence. The caller has checked ``refuse_recurrent``."""

    def __init__(self, model: PreTrainedModel, layer_ids: tuple[int, ...]) -> None:
        self.model = model
        self.layer_ids = layer_ids
        self.anatomy = dissect(model)
        self.cache = DynamicCache(config=model.config)
        # A sliding layer forgets what a rollback would need; a full one is masked to the same window.
        self.cache.layers = [
            DynamicLayer() if sliding else layer
            for layer, sliding in zip(self.cache.layers, self.cache.is_sliding, strict=True)
        ]
        self.num_tokens = 0

    @torch.no_grad()
    def forward(self, token_ids: Tensor) -> VerifyOutput:
        """Append ``token_ids`` [n] to the cache and return what the target says about each."""
        with recording(self.anatomy, self.layer_ids) as recorded:
            input_ids = token_ids.to(self.model.device)[None]
            output = self.model(input_ids=input_ids, past_key_values=self.cache, use_cache=True)
        self.num_tokens += token_ids.numel()
        states, last = recorded.take(self.layer_ids)
        return VerifyOutput(output.logits[0], states[0], last[0])

    def rollback(self, num_tokens: int) -> None:
        """Forget the last ``num_tokens`` tokens of the cache."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"rollback of {num_tokens} tokens; the cache holds {self.num_tokens}")
        if num_tokens:
            self.cache.crop(-num_tokens)  # the positive form (tokens to keep) is gone from newer transformers
            self.num_tokens -= num_tokens


def refuse_recurrent(config: PreTrainedConfig) -> None:
    """Raise ValueError when the cache of this kind of target keeps a state that cannot be rolled back.

    Decided from the config and the model's class, before any weights are read.
    """
    text: Any = config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    stuck = [i for i, layer in enumerate(cache.layers) if not layer.is_croppable]
    if stuck:
        kind = kinds[stuck[0]] if stuck[0] < len(kinds) else type(cache.layers[stuck[0]]).__name__
    elif skeleton(config)._is_stateful:
        kind = "recurrent state"
    else:
        return
    raise ValueError(
        f"a target of type {config.model_type!r} cannot be decoded speculatively: its cache cannot roll back "
        f"(layer kind {kind!r}); measure it with evaluate.mode=replay, which needs no target forward"
    )
