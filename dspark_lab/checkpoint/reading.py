"""A drafter's checkpoint from a folder or the hub, in whichever known format, translated into this project's words."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark_lab.checkpoint.description import Description
from dspark_lab.checkpoint.foreign import READERS
from dspark_lab.checkpoint.speculators import from_config
from dspark_lab.data.vocabulary import DraftVocabulary

HUB_FILES = ("*.json", "*.safetensors", "pytorch_model*.bin")
_NOT_WEIGHTS = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """``tensors`` by this project's parameter names, the target's matrices (if the file has them) among them."""

    source: str
    format: str
    description: Description
    tensors: Mapping[str, Tensor]
    vocabulary: DraftVocabulary


def read_checkpoint(source: str) -> Checkpoint:
    """Read a folder or hub repository.

    Raises:
        ValueError: it cannot be found, is in no known format, or contradicts itself; names the key and what was found.
    """
    folder = find_checkpoint(source)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = read_tensors(folder)
        name, description, tensors = translate(config, tensors)
        return Checkpoint(source, name, description, tensors, read_vocabulary(description, tensors))
    except (ValueError, OSError) as error:
        raise ValueError(f"drafter.from_pretrained={source!r}: {error}") from error


def translate(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, Description, dict[str, Tensor]]:
    """(format, description, tensors by our names) of a parsed checkpoint."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(_NOT_WEIGHTS)}
    if config.get("speculators_model_type"):
        return "speculators", from_config(config), kept
    architecture = (config.get("architectures") or ["none"])[0]
    if any(name.startswith("midlayer.") for name in tensors):
        architecture = "LlamaForCausalLMEagle3"  # its authors' files name a plain Llama
    if architecture not in READERS:
        raise ValueError(
            f"config.json has no speculators_model_type and architecture {architecture!r}, which is none of "
            f"{', '.join(READERS)}: convert the checkpoint to the speculators format first"
        )
    name, read, rename = READERS[architecture]
    renamed = {rename(old) if rename else old: tensor for old, tensor in kept.items()}
    return name, read(config), renamed


def find_checkpoint(source: str) -> Path:
    """The folder itself, or the hub's snapshot of that id (from its cache where it is whole)."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise ValueError(f"drafter.from_pretrained={source!r} is neither a folder nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=list(HUB_FILES)))
    # The hub's client raises another family of network errors in each of its major versions.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else "no detail"
        raise ValueError(
            f"drafter.from_pretrained={source!r} is no folder, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {reason}). Name a folder, or connect to the hub and check the id."
        ) from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: safetensors (in one file or several), else PyTorch's own files."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    for file in [] if files else sorted(folder.glob("pytorch_model*.bin")):
        tensors |= torch.load(file, map_location="cpu", weights_only=True)
    if not tensors:
        raise ValueError(f"{folder} holds no *.safetensors and no pytorch_model*.bin")
    return tensors


def read_vocabulary(description: Description, tensors: Mapping[str, Tensor]) -> DraftVocabulary:
    """From ``d2t`` (offsets); ``t2d``, where it is there, must say the same.

    Raises:
        ValueError: they do not fit each other or the config's sizes.
    """
    vocab_size, size = description.vocab_size, description.draft_vocab_size
    if size == vocab_size:
        return DraftVocabulary.full(vocab_size)
    if "d2t" not in tensors:
        raise ValueError(f"draft_vocab_size={size} of {vocab_size} tokens, but there is no d2t that says which")
    d2t = tensors["d2t"].to(torch.int64)
    if d2t.shape != (size,):
        raise ValueError(f"d2t: expected shape [{size}] (draft_vocab_size), found {list(d2t.shape)}")
    try:
        vocabulary = DraftVocabulary.of(torch.arange(size) + d2t, vocab_size=vocab_size)
    except ValueError as error:
        raise ValueError(f"d2t (offsets, target id = draft id + d2t): {error}") from error
    t2d = tensors.get("t2d")
    if t2d is not None and (t2d.shape != (vocab_size,) or not torch.equal(t2d.bool(), vocabulary.t2d)):
        raise ValueError(
            f"t2d marks {int(t2d.bool().sum())} of {t2d.numel()} tokens and d2t names {size} of {vocab_size}: they are not "
            "the same tokens"
        )
    return vocabulary
