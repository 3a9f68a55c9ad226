"""Checksums of payloads, which hs-connectors' wire format (version 1) and vLLM's files lack.

The reply that describes a payload goes out before its states are copied, from another process, so it cannot hold their
checksum. That of an object lies behind its tensors, where the reply says; that of a file in the file's metadata. Stock
readers, which look at the tensors alone, notice neither; payloads of stock producers have none.
"""

import zlib
from typing import Any

import torch
from torch import Tensor

OFFSET = "checksum_offset"  # of an object's checksum, in ``kv_transfer_params``
CHECKSUM_BYTES = 64  # that it takes: XXH3-64 in the first eight; payloads are multiples of 64
CRC32 = "crc32"  # in a file's metadata


def leave_room(described: dict[str, Any]) -> None:
    """Make the payload that ``described`` announces larger by its checksum."""
    end = described["metadata"]["total_aligned_bytes"]
    described[OFFSET] = end
    described["metadata"]["total_aligned_bytes"] = end + CHECKSUM_BYTES


def seal(payload: memoryview) -> None:
    """Write the checksum of a payload's bytes into the room that was left at its end."""
    payload[-CHECKSUM_BYTES:] = _xxh3(payload).ljust(CHECKSUM_BYTES, b"\0")


def is_sound(payload: memoryview) -> bool:
    """Whether a sealed payload has the bytes that were sealed."""
    return payload[-CHECKSUM_BYTES:][:8] == _xxh3(payload)


def crc32_of(states: Tensor, token_ids: Tensor) -> str:
    """As a file's metadata hold it: CRC-32 of the bytes of both."""
    first = zlib.crc32(states.view(torch.uint8).numpy().data)
    return str(zlib.crc32(token_ids.view(torch.uint8).numpy().data, first))


def _xxh3(payload: memoryview) -> bytes:
    import xxhash  # comes with Mooncake (the extra "mooncake")

    return xxhash.xxh3_64_digest(payload[:-CHECKSUM_BYTES])
