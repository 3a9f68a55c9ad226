"""One process's connection to Mooncake: registered buffers, and calls that raise instead of returning codes."""

import mmap
import os
import socket
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark_lab.store.mooncake_admin import MasterUnreachableError
from dspark_lab.store.mooncake_errors import OBJECT_NOT_FOUND, MooncakeError, error_of

CONNECT_TIMEOUT_S = 5.0
SMALLEST_SLAB_BYTES = 2**16
SLAB_GRANULE_BYTES = 64 * 2**20
NUM_FREE_SLABS = 4


class MooncakeClient:
    """A client that contributes no memory. It belongs to the process that made it: Mooncake's threads die in a fork.

    Args:
        master_address: host:port of ``mooncake_master``.
        protocol: "tcp" or "rdma"; ``rdma_devices`` are names separated by commas, empty for Mooncake's own choice.
        local_hostname: The address under which other processes reach this one.

    Raises:
        MasterUnreachableError: nothing listens at ``master_address``.
    """

    def __init__(self, *, master_address: str, protocol: str, rdma_devices: str, local_hostname: str) -> None:
        from mooncake.store import (  # pyright: ignore[reportMissingImports]
            MooncakeDistributedStore,
            ReplicateConfig,
        )

        _require_listener(master_address)
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(local_hostname, "P2PHANDSHAKE", 0, 0, protocol, rdma_devices, master_address)
        if code < 0:
            raise error_of(code, f"connecting to {master_address} by {protocol}")
        # Evicted states would have to be captured again: what is put stays until it is removed.
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._slabs: list[_Slab] = []  # the free ones
        self.pid = os.getpid()

    def take(self, num_bytes: int) -> Tensor:
        """Registered memory, uint8 [num_bytes], in use for as long as a tensor views it."""
        slab = min((s for s in self._slabs if s.capacity >= num_bytes), key=lambda s: s.capacity, default=None)
        if slab:
            self._slabs.remove(slab)
        else:
            slab = self._new_slab(num_bytes)
        view = slab.array[:num_bytes]
        weakref.finalize(view, self._slabs.append, slab).atexit = False
        return torch.from_numpy(view)

    def exists(self, name: str) -> bool:
        return bool(_checked(self._store.is_exist(name), f"looking for {name!r}"))

    def size(self, name: str) -> int:
        """Bytes of the object. Raises MissingSampleError."""
        return _checked(self._store.get_size(name), f"size of {name!r}")

    def put(self, names: Sequence[str], buffers: Sequence[Tensor]) -> None:
        """Publish registered buffers, all or none; an object that is there is left as it is. Raises NoRoomError."""
        pointers, sizes = [buffer.data_ptr() for buffer in buffers], [buffer.numel() for buffer in buffers]
        codes = self._store.batch_put_from(list(names), pointers, sizes, self._pinned)
        failed = [(code, name) for code, name in zip(codes, names, strict=True) if code < 0]
        if failed:
            self.remove([name for code, name in zip(codes, names, strict=True) if code >= 0])
            code, name = failed[0]
            raise error_of(code, f"put of {name!r}")

    def get_into(self, names: Sequence[str], buffers: Sequence[Tensor]) -> list[int]:
        """Fill registered buffers; the bytes of each object. Raises MissingSampleError, TransferError, LeaseExpiredError."""
        pointers, sizes = [buffer.data_ptr() for buffer in buffers], [buffer.numel() for buffer in buffers]
        codes = self._store.batch_get_into(list(names), pointers, sizes)
        return [_checked(code, f"get of {name!r}") for code, name in zip(codes, names, strict=True)]

    def get_heads(self, names: Sequence[str], num_bytes: int) -> list[Tensor | None]:
        """The first ``num_bytes`` of each object, None for one that is missing or shorter."""
        if not names:
            return []
        buffer, starts = self.take(len(names) * num_bytes), [[i * num_bytes] for i in range(len(names))]
        zeros, sizes = [[0]] * len(names), [[num_bytes]] * len(names)
        codes = self._store.get_into_ranges([buffer.data_ptr()], [list(names)], [starts], [zeros], [sizes])[0]
        return [
            head.clone() if code == [num_bytes] else None
            for code, head in zip(codes, buffer.split(num_bytes), strict=True)
        ]

    def remove(self, names: Sequence[str]) -> None:
        """Forget objects, even while they are read; a missing one is no error."""
        # Forced, because looking at an object already leases it.
        for code, name in zip(self._store.batch_remove(list(names), True) if names else (), names, strict=True):
            if code != OBJECT_NOT_FOUND:
                _checked(code, f"removal of {name!r}")

    def close(self) -> None:
        for slab in self._slabs:
            self._store.unregister_buffer(slab.pointer)
        self._slabs.clear()
        self._store.close()

    def _new_slab(self, num_bytes: int) -> "_Slab":
        if len(self._slabs) >= NUM_FREE_SLABS:  # all too small
            smallest = min(self._slabs, key=lambda slab: slab.capacity)
            self._slabs.remove(smallest)
            self._store.unregister_buffer(smallest.pointer)
        slab = _Slab(num_bytes)
        code = self._store.register_buffer(slab.pointer, slab.capacity)
        if code != 0:
            raise MooncakeError(
                f"registering {slab.capacity:,} bytes failed: Mooncake returned {code}. With rdma the limit is "
                "`ulimit -l` (memlock): raise it, or lower store.part_bytes."
            )
        return slab


class _Slab:
    """Page-aligned memory, a power of two below 64 MiB, then a multiple of that: samples of similar sizes share slabs."""

    def __init__(self, num_bytes: int) -> None:
        small = max(SMALLEST_SLAB_BYTES, 1 << (max(num_bytes, 1) - 1).bit_length())
        self.capacity = min(small, -(-num_bytes // SLAB_GRANULE_BYTES) * SLAB_GRANULE_BYTES or small)
        self.array = np.frombuffer(mmap.mmap(-1, self.capacity), dtype=np.uint8)
        self.pointer = self.array.ctypes.data


def _checked(code: int, what: str) -> int:
    if code < 0:
        raise error_of(code, what)
    return code


def _require_listener(address: str) -> None:
    # Mooncake's own connection to a master that is not there blocks for minutes.
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"master_address={address!r}: give host:port of mooncake_master.")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise MasterUnreachableError(
            f"no mooncake_master answers at store.master_address={address} ({error}). Start it, or correct the address."
        ) from error
