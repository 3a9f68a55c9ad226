"""Several samples in one safetensors file: written whole, read sample by sample through a memory map."""

import zlib
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark_lab.records import TargetSample
from dspark_lab.store.protocol import CorruptSampleError, Manifest
from dspark_lab.store.sample import misfit, require_finite

TENSORS = ("token_ids", "loss_mask", "hidden_states", "last_hidden_state")
MAX_OPEN_SHARDS = 32


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a published sample lies and how to know it again."""

    shard: str
    num_tokens: int
    crc32: int


def write_shard(path: Path, samples: Mapping[str, TargetSample]) -> dict[str, Entry]:
    """Write admitted samples as tensors ``<key>/<name>``: ids int32, mask uint8, states as they are."""
    tensors: dict[str, Tensor] = {}
    entries: dict[str, Entry] = {}
    for key, sample in samples.items():
        stored = {
            "token_ids": sample.token_ids.to(torch.int32),
            "loss_mask": sample.loss_mask.to(torch.uint8),
            "hidden_states": sample.hidden_states,
            "last_hidden_state": sample.last_hidden_state,
        }
        tensors |= {f"{key}/{name}": tensor for name, tensor in stored.items()}
        entries[key] = Entry(path.name, sample.token_ids.numel(), checksum(stored))
    save_file(tensors, path)
    return entries


def checksum(stored: Mapping[str, Tensor]) -> int:
    """CRC-32 of a sample's bytes as they lie on disk."""
    crc32 = 0
    for name in TENSORS:
        crc32 = zlib.crc32(stored[name].view(torch.uint8).numpy().data, crc32)
    return crc32


class OpenShards:
    """Memory maps of the shards read last; only the pages of wanted tensors are ever read from disk."""

    def __init__(self, folder: Path, *, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._maps: OrderedDict[str, safe_open] = OrderedDict()

    def read(self, key: str, entry: Entry) -> TargetSample:
        """States are views of the map. Raises CorruptSampleError (key and file named) or NonFiniteSampleError."""
        path = self.folder / entry.shard
        try:
            shard = self._open(entry.shard)
            stored = {name: shard.get_tensor(f"{key}/{name}") for name in TENSORS}
        except FileNotFoundError:
            raise _corrupt(key, path, "the file is gone") from None
        except SafetensorError as error:
            raise _corrupt(key, path, str(error)) from error
        if checksum(stored) != entry.crc32:
            raise _corrupt(key, path, "its checksum differs")
        sample = TargetSample(
            token_ids=stored["token_ids"].to(torch.int64),
            loss_mask=stored["loss_mask"].to(torch.bool),
            hidden_states=stored["hidden_states"],
            last_hidden_state=stored["last_hidden_state"],
        )
        problem = misfit(sample, manifest=self.manifest)
        if problem or sample.hidden_states.dtype != self.manifest.torch_dtype:
            raise _corrupt(key, path, problem or f"its dtype is {sample.hidden_states.dtype}")
        require_finite(key, sample)
        return sample

    def retain(self, shards: Collection[str]) -> None:
        """Unmap all others: a deleted file takes room as long as anyone maps it."""
        for name in self._maps.keys() - set(shards):
            del self._maps[name]

    def _open(self, name: str) -> safe_open:
        if name not in self._maps:
            self._maps[name] = safe_open(self.folder / name, framework="pt")
        self._maps.move_to_end(name)
        if len(self._maps) > MAX_OPEN_SHARDS:
            self._maps.popitem(last=False)
        return self._maps[name]


def _corrupt(key: str, path: Path, reason: str) -> CorruptSampleError:
    return CorruptSampleError(f"sample {key!r} in {path} is corrupt: {reason}. Delete it and capture it again.")
