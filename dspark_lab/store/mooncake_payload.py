"""How a sample lies in Mooncake: one object, or, above ``part_bytes``, several and a head that is written last.

The head is 64 bytes (``Header``), the XXH3-64 of every part (8 bytes each) and, when there is but one part, that part. It
names its writer, and so do the names of parts: of two writers of one key, neither has a part in the other's sample.

A part is a piece of the payload: hidden_states [T, L, H], last_hidden_state [T, H], token_ids int32 [T], loss_mask uint8
[T], each beginning at a multiple of 64 bytes. Mooncake publishes an object as a whole, so the head publishes the sample.
"""

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import xxhash
from torch import Tensor

from dspark_lab.records import TargetSample
from dspark_lab.store.protocol import CorruptSampleError, Manifest

ALIGNMENT = 64
HEADER_BYTES = 64
MAGIC = b"DSLAB"
VERSION = 2
# magic, version, parts, tokens, payload bytes, part bytes, writer, digest of the digests
_HEADER = struct.Struct("<8sIIQQQQQ")
_DIGEST = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Header:
    num_tokens: int
    payload_bytes: int
    part_bytes: int
    writer: int  # drawn for each put
    digests: tuple[int, ...]

    @classmethod
    def for_payload(cls, payload: Tensor, *, num_tokens: int, part_bytes: int) -> "Header":
        digests = tuple(map(digest, payload.split(part_bytes)))
        return cls(num_tokens, payload.numel(), part_bytes, secrets.randbits(64), digests)

    @property
    def num_parts(self) -> int:
        return len(self.digests)

    def to_bytes(self, key: str) -> bytes:
        """Padded to ``head_bytes(num_parts)``. The key is signed too: a head under another key is not taken for its own."""
        digests = b"".join(map(_DIGEST.pack, self.digests))
        fixed = _HEADER.pack(
            MAGIC, VERSION, self.num_parts, self.num_tokens, self.payload_bytes, self.part_bytes, self.writer,
            xxhash.xxh3_64_intdigest(digests),
        )  # fmt: skip
        header = (fixed + _signature(fixed, key)).ljust(HEADER_BYTES, b"\0")
        return (header + digests).ljust(head_bytes(self.num_parts), b"\0")

    @classmethod
    def from_bytes(cls, head: Tensor, key: str) -> "Header":
        """Raises CorruptSampleError. ``head`` is uint8, at least ``head_bytes`` of it; with 64 bytes digests are empty."""
        raw = head[:HEADER_BYTES].numpy().tobytes()
        fixed = raw[: _HEADER.size]
        if len(raw) < HEADER_BYTES or not fixed.startswith(MAGIC):
            raise _corrupt(key, f"its head has {len(raw)} bytes and does not begin as one of this store")
        _, version, num_parts, num_tokens, payload_bytes, part_bytes, writer, sealed = _HEADER.unpack(fixed)
        if version != VERSION:
            raise _corrupt(key, f"it was written in form {version}, this code reads form {VERSION}")
        if raw[_HEADER.size : _HEADER.size + _DIGEST.size] != _signature(fixed, key):
            raise _corrupt(key, "its head is damaged or another sample's")
        digests = head[HEADER_BYTES : HEADER_BYTES + _DIGEST.size * num_parts].numpy().tobytes()
        if len(raw) < head.numel() and xxhash.xxh3_64_intdigest(digests) != sealed:
            raise _corrupt(key, "the checksums in its head are damaged")
        found = tuple(value for (value,) in _DIGEST.iter_unpack(digests))
        return cls(num_tokens, payload_bytes, part_bytes, writer, found)

    def check(self, payload: Tensor, key: str) -> None:
        """Raises CorruptSampleError unless every part of ``payload`` [payload_bytes] has its checksum."""
        if payload.numel() != self.payload_bytes or not self.digests:
            raise _corrupt(key, f"it has {payload.numel():,} of {self.payload_bytes:,} bytes")
        for number, (part, wanted) in enumerate(zip(payload.split(self.part_bytes), self.digests, strict=True), 1):
            if digest(part) != wanted:
                raise _corrupt(key, f"the checksum of part {number} of {self.num_parts} differs")


def head_bytes(num_parts: int) -> int:
    return _aligned(HEADER_BYTES + _DIGEST.size * num_parts)


def payload_bytes(num_tokens: int, manifest: Manifest) -> int:
    return sum(_aligned(prod(shape) * dtype.itemsize) for _, shape, dtype in _layout(num_tokens, manifest))


def views(payload: Tensor, num_tokens: int, manifest: Manifest) -> TargetSample:
    """The payload's bytes as tensors: ids int32, mask uint8. Nothing is copied."""
    found, start = {}, 0
    for name, shape, dtype in _layout(num_tokens, manifest):
        size = prod(shape) * dtype.itemsize
        found[name] = payload[start : start + size].view(dtype).view(shape)
        start += _aligned(size)
    return TargetSample(**found)


def digest(part: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(part.numpy().data)


def _layout(num_tokens: int, manifest: Manifest) -> Sequence[tuple[str, tuple[int, ...], torch.dtype]]:
    return (
        ("hidden_states", (num_tokens, len(manifest.layer_ids), manifest.hidden_size), manifest.torch_dtype),
        ("last_hidden_state", (num_tokens, manifest.hidden_size), manifest.torch_dtype),
        ("token_ids", (num_tokens,), torch.int32),
        ("loss_mask", (num_tokens,), torch.uint8),
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _signature(fixed: bytes, key: str) -> bytes:
    return _DIGEST.pack(xxhash.xxh3_64_intdigest(fixed + key.encode()))


def _corrupt(key: str, problem: str) -> CorruptSampleError:
    return CorruptSampleError(f"sample {key!r} in Mooncake: {problem}. delete({key!r}), then capture it again.")
