"""A real mooncake_master with a real segment, and what tests do to them."""

import atexit
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from stored_samples import MANIFEST, is_intact, key_of, sample_of

from dspark_lab.cluster.services import MooncakeMaster, MooncakeSegment, Service
from dspark_lab.store.protocol import MissingSampleError

try:
    from mooncake.store import MooncakeDistributedStore

    from dspark_lab.store.mooncake import MooncakeStore
except ImportError:
    MooncakeDistributedStore: Any = None
    MooncakeStore: Any = None

needs_mooncake = [
    pytest.mark.mooncake,
    pytest.mark.skipif(MooncakeStore is None, reason="mooncake is not installed: make test-services"),
]


class World:
    """A master and its one segment; ``close`` ends both."""

    def __init__(self, folder: Path, *, num_bytes: int, lease_s: float = 60.0) -> None:
        self._services = ExitStack()
        self.master = self._services.enter_context(MooncakeMaster(folder=folder, lease_s=lease_s))
        self.segment = self._services.enter_context(MooncakeSegment(self.master, folder=folder, num_bytes=num_bytes))

    def close(self) -> None:
        self._services.close()

    def settings(self, **settings: Any) -> dict[str, Any]:
        return {
            "manifest": MANIFEST,
            "namespace": f"test-{uuid.uuid4().hex[:8]}",
            "generation": None,
            "master_address": self.master.address,
            "admin_url": self.master.admin_url,
            "protocol": "tcp",
            "rdma_devices": "",
            "local_hostname": "127.0.0.1",
            "part_bytes": 64 * 2**20,
        } | settings

    def store(self, **settings: Any) -> "MooncakeStore":
        return MooncakeStore(**self.settings(**settings))

    @cached_property
    def stranger(self) -> "MooncakeDistributedStore":
        """A client that knows nothing of our format, to look at objects and to spoil them."""
        client = MooncakeDistributedStore()
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * 2**20, "tcp", "", self.master.address) == 0
        return client


@cache
def shared_world() -> World:
    """One for all tests that do not harm it."""
    folder = tempfile.TemporaryDirectory()
    world = World(Path(folder.name), num_bytes=512 * 2**20)
    atexit.register(lambda: (world.close(), folder.cleanup()))
    return world


def kill(service: Service) -> None:
    """SIGKILL to the server itself; its watcher lives on."""
    watcher = service._process.pid
    (server,) = Path(f"/proc/{watcher}/task/{watcher}/children").read_text().split()
    os.kill(int(server), signal.SIGKILL)


def spoil(world: World, name: str, change: Callable[[bytearray], bytes | bytearray | None]) -> None:
    """Replace the object ``name`` by what ``change`` makes of its bytes; None removes it."""
    content = bytearray(world.stranger.get(name))
    assert content, f"{name} is not there"
    assert world.stranger.remove(name, True) == 0
    changed = change(content)
    if changed is not None:
        assert world.stranger.put(name, bytes(changed)) == 0


def put_and_tell(settings: Mapping[str, Any], seeds: range, told: Connection) -> None:
    """Put samples into a running generation; tell each key when it is published."""
    with MooncakeStore(**settings) as store:
        for seed in seeds:
            store.put(key_of(seed), sample_of(seed))
            told.send(key_of(seed))


def is_there(store: "MooncakeStore", key: str) -> bool:
    try:  # a key may be named while its head is still being written
        return key in set(store.keys()) and store.get(key) is not None
    except MissingSampleError:
        return False


def count_damaged(settings: Mapping[str, Any], seeds: range, told: Connection) -> None:
    """Wait for every sample, look at it three times, tell how many looks were not as put."""
    with MooncakeStore(**settings) as store:
        damaged = 0
        for seed in seeds:
            while not is_there(store, key_of(seed)):
                time.sleep(0.05)
            damaged += sum(not is_intact(store, key_of(seed)) for _ in range(3))
        told.send(damaged)
