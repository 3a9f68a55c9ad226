"""What a target's ``config.json`` says, as data: for one whose class Transformers lacks, or that nothing here ever loads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_lab.records import TargetSpec
from dspark_lab.target.anatomy import read_tensor
from dspark_lab.target.protocol import TargetHead


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTensors:
    """Names in the target's safetensors files; the last state is taken before ``norm``, an RMS norm."""

    embedding: str
    norm: str
    lm_head: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """``num_attention_heads`` 0: no layer of it is one that a drafter could have (latent, linear). ``tensors`` None: by
    the names that Transformers gives them. ``runs_tokenizer_code``: the tokenizer is Python in the target's repository,
    which is trusted."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    tensors: HeadTensors | None
    runs_tokenizer_code: bool

    def spec(
        self,
        *,
        name: str,
        model: str,
        layer_ids: Sequence[int],
        mask_token_id: int,
        revision: str = "not read",
        fingerprint: str = "not read",
        template_hash: str = "not read",
    ) -> TargetSpec:
        """The target; without identity when nothing of its files was read."""
        return TargetSpec(
            name=name,
            model=model,
            revision=revision,
            fingerprint=fingerprint,
            template_hash=template_hash,
            architecture=self.architecture,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope_parameters),
            layer_ids=tuple(layer_ids),
            mask_token_id=mask_token_id,
            eos_token_ids=tuple(self.eos_token_ids),
        )

    def read_head(self, folder: Path, *, dtype: torch.dtype) -> TargetHead:
        """Raises ValueError for a tensor that the files do not hold."""
        assert self.tensors is not None
        names = (self.tensors.embedding, self.tensors.norm, self.tensors.lm_head)
        found = [read_tensor(folder, name, dtype) for name in names]
        missing = [name for name, tensor in zip(names, found, strict=True) if tensor is None]
        if missing:
            raise ValueError(f"target.facts.tensors: {', '.join(missing)} is in no safetensors file of {folder}")
        embedding, norm, lm_head = (tensor for tensor in found if tensor is not None)
        return TargetHead(embedding, norm, self.rms_norm_eps, lm_head)
