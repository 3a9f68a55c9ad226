"""Where a transformers model keeps its decoder layers, final norm, embedding and head; and hooks on the states between.

Convention: id i is the residual stream entering decoder layer i = transformers' ``hidden_states[i]``; the last state is
taken before the final norm (transformers' last entry is already normed).
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from dspark_lab.target.protocol import TargetHead

LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier")


@dataclass(frozen=True, slots=True)
class Anatomy:
    decoder: nn.Module
    layers: nn.ModuleList
    norm: Any
    embedding: Any
    lm_head: Any


def dissect(model: PreTrainedModel) -> Anatomy:
    """Find the parts by the names that transformers gives them in every recent decoder-only model."""
    decoder = model.get_decoder()
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(layers, nn.ModuleList) or norm is None or lm_head is None:
        raise ValueError(
            f"target architecture {type(model).__name__} has no decoder with `layers` and a final `norm`: "
            f"its hidden states cannot be captured"
        )
    return Anatomy(decoder, layers, norm, embedding, lm_head)


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without storage: shapes, names and classes only."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@dataclass(slots=True)
class RecordedStates:
    """Filled by one forward: [B, T, H] per requested layer, and the state before the final norm."""

    by_layer: dict[int, Tensor] = field(default_factory=dict)
    last: Tensor | None = None

    def take(self, layer_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """([B, T, L, H], [B, T, H]) and forget them, so that nothing outlives its batch."""
        assert self.last is not None
        states, last = torch.stack([self.by_layer[i] for i in layer_ids], dim=-2), self.last
        self.by_layer.clear()
        self.last = None
        return states, last


@contextmanager
def recording(anatomy: Anatomy, layer_ids: Sequence[int]) -> Iterator[RecordedStates]:
    """Hooks that keep the requested states of a forward and no other layer's."""
    recorded = RecordedStates()

    def keep_layer(layer_id: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recorded.by_layer[layer_id] = args[0] if args else kwargs["hidden_states"]

        return hook

    def keep_last(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorded.last = args[0] if args else kwargs["hidden_states"]

    handles = [anatomy.layers[i].register_forward_pre_hook(keep_layer(i), with_kwargs=True) for i in layer_ids]
    handles.append(anatomy.norm.register_forward_pre_hook(keep_last, with_kwargs=True))
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def read_head(folder: Path, config: PreTrainedConfig, *, dtype: torch.dtype) -> TargetHead | None:
    """Embedding, final norm and lm_head out of safetensors files alone; None when they are not there by these names.

    Raises:
        ValueError: the target's head is not ``lm_head @ rms_norm(state)``, which is all that a ``TargetHead`` computes.
    """
    model = skeleton(config)
    anatomy = dissect(model)
    text: Any = config.get_text_config(decoder=True)
    offset = _norm_offset(anatomy, text)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embedding = read_tensor(folder, names[id(anatomy.embedding.weight)], dtype)
    norm = read_tensor(folder, names[id(anatomy.norm.weight)], dtype)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    lm_head = embedding if tied else read_tensor(folder, names[id(anatomy.lm_head.weight)], dtype)
    if embedding is None or norm is None or lm_head is None:
        return None
    return TargetHead(embedding, norm + offset, text.rms_norm_eps, lm_head)


def borrow_head(model: PreTrainedModel) -> TargetHead:
    """The same three matrices, shared with a loaded model."""
    anatomy = dissect(model)
    text: Any = model.config.get_text_config(decoder=True)
    offset = _norm_offset(anatomy, text)
    embedding, lm_head = anatomy.embedding.weight.detach(), anatomy.lm_head.weight.detach()
    lm_head = embedding if lm_head.data_ptr() == embedding.data_ptr() else lm_head
    return TargetHead(embedding, anatomy.norm.weight.detach() + offset, text.rms_norm_eps, lm_head)


def _norm_offset(anatomy: Anatomy, config: Any) -> float:
    """What the final norm adds to its weight: 0, or 1 (Qwen3-Next's). ValueError for logits that no ``TargetHead`` gives."""
    changed = [name for name in LOGIT_CHANGES if getattr(config, name, None) not in (None, 1, 1.0)]
    if getattr(anatomy.lm_head, "bias", None) is not None:
        changed.append("lm_head.bias")
    found = [offset for offset in (0.0, 1.0) if _is_rms_norm(anatomy.norm, config.rms_norm_eps, offset)]
    # Gemma's too, but that scales its embeddings besides, and no key of its config says so.
    if changed or not found or (found == [1.0] and config.model_type.startswith("gemma")):
        raise ValueError(
            f"target of type {config.model_type}: its logits are not lm_head(rms_norm(state)) "
            f"({', '.join(changed) or type(anatomy.norm).__name__}), so drafters cannot borrow its head"
        )
    return found[0]


def _is_rms_norm(norm: nn.Module, eps: float, offset: float) -> bool:
    """Whether the module computes (offset + weight) * x / rms(x), tried on numbers."""
    trial: Any = copy.deepcopy(norm).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(trial.weight.shape, generator=generator)
    with torch.no_grad():
        trial.weight.copy_(torch.rand(trial.weight.shape, generator=generator))
        expected = F.rms_norm(state, trial.weight.shape, offset + trial.weight, eps)
        return torch.allclose(trial(state), expected, atol=1e-5)


def read_tensor(folder: Path, name: str, dtype: torch.dtype) -> Tensor | None:
    """Out of the folder's safetensors files; None when no file holds it."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                return tensors.get_tensor(name).to(dtype)
    return None
