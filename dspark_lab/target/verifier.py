"""The cached forward of one sequence that speculative decoding verifies with, and its rollback."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from dspark_lab.target.anatomy import dissect, recording, skeleton
from dspark_lab.target.protocol import VerifyOutput

CONTINUING = ("qwen3_next",)
"""Model types whose recurrent layers are known to take several tokens at once from a cached state on (Mamba's do not)."""

Snapshot = Sequence[Mapping[str, Any]]


class HuggingFaceVerifier:
    """A transformers model with a cache for one sequence. The caller has checked ``refuse_recurrent``.

    Keys and values of attention layers are cropped. A recurrent state cannot be: it is copied before every forward and put
    back by a rollback, and the tokens of that forward that stay are fed once more, at the head of the next one.
    """

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
        self.recurrent = [layer for layer in self.cache.layers if isinstance(layer, LinearAttentionLayer)]
        self.before: Snapshot | None = None  # recurrent states before the last forward; None once they are put back
        self.fed = torch.empty(0, dtype=torch.int64)  # its tokens; with ``before`` put back, those to be fed again
        self.num_tokens = 0

    @torch.no_grad()
    def forward(self, token_ids: Tensor) -> VerifyOutput:
        """Append ``token_ids`` [n] to the cache and return what the target says about each."""
        new = token_ids.to(self.model.device)
        if self.recurrent:
            again = self.fed if self.before is None else self.fed[:0]
            self.fed, self.before = torch.cat([again.to(new), new]), _snapshot(self.recurrent)
        fed = self.fed if self.recurrent else new
        with recording(self.anatomy, self.layer_ids) as recorded:
            output = self.model(input_ids=fed[None], past_key_values=self.cache, use_cache=True)
        self.num_tokens += new.numel()
        states, last = recorded.take(self.layer_ids)
        ours = slice(fed.numel() - new.numel(), None)
        return VerifyOutput(output.logits[0, ours], states[0, ours], last[0, ours])

    def rollback(self, num_tokens: int) -> None:
        """Forget the last ``num_tokens`` tokens of the cache; with recurrent layers, tokens of the last forward only."""
        held = self.fed.numel() if self.recurrent else self.num_tokens
        if not 0 <= num_tokens <= held:
            raise ValueError(f"rollback of {num_tokens} tokens; the cache holds {held}")
        if not num_tokens:
            return
        self.num_tokens -= num_tokens
        if not self.recurrent:
            self.cache.crop(-num_tokens)  # the positive form (tokens to keep) is gone from newer transformers
            return
        if self.before is not None:
            _restore(self.recurrent, self.before)
            self.before = None
            for layer in self.cache.layers:
                if isinstance(layer, DynamicLayer):
                    layer.crop(-self.fed.numel())
        self.fed = self.fed[:-num_tokens]


def _snapshot(layers: Sequence[LinearAttentionLayer]) -> Snapshot:
    """Everything the layers hold, copied: they write into their states in place."""
    return [{name: _copied(value) for name, value in vars(layer).items()} for layer in layers]


def _restore(layers: Sequence[LinearAttentionLayer], states: Snapshot) -> None:
    for layer, state in zip(layers, states, strict=True):
        vars(layer).update(state)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def recurrence(config: PreTrainedConfig) -> str | None:
    """The kind of layer whose cache cannot be cropped; None where all can. No weights are read."""
    text: Any = config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    stuck = [i for i, layer in enumerate(cache.layers) if not layer.is_croppable]
    if stuck:
        return kinds[stuck[0]] if stuck[0] < len(kinds) else type(cache.layers[stuck[0]]).__name__
    return "recurrent state" if skeleton(config)._is_stateful else None


def refuse_recurrent(config: PreTrainedConfig) -> None:
    """Raise ValueError when the cache of this kind of target keeps a state that cannot be rolled back.

    Decided from the config and the model's class, before any weights are read.
    """
    kind = recurrence(config)
    if kind is None:
        return
    text: Any = config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    # A layer of both kinds at once, or a state that the cache does not hold, is more than a snapshot puts back.
    put_back = all(layer.is_croppable or type(layer) is LinearAttentionLayer for layer in layers)
    if text.model_type in CONTINUING and put_back:
        return
    raise ValueError(
        f"a target of type {config.model_type!r} cannot be decoded speculatively: its cache cannot roll back "
        f"(layer kind {kind!r}); measure it with evaluate.mode=replay, which needs no target forward"
    )
