"""Mooncake with several processes, and with processes that die: real ones, real SIGKILL."""

import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mooncake_world import World, count_damaged, kill, needs_mooncake, put_and_tell, shared_world
from stored_samples import StoredKeys, is_intact, key_of, sample_of
from torch.utils.data import DataLoader

from dspark_lab.store.mooncake_admin import MasterUnreachableError
from dspark_lab.store.mooncake_errors import CODES, LeaseExpiredError, MooncakeError, TransferError, error_of
from dspark_lab.store.protocol import MissingSampleError

pytestmark = needs_mooncake


@pytest.fixture
def own_world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, num_bytes=64 * 2**20)
    yield world
    world.close()


@pytest.mark.slow
def test_many_processes(tmp_path: Path) -> None:
    """Two writers, two readers that start before them; what a dead writer has put stays."""
    world = shared_world()
    store = world.store(part_bytes=128)
    settings = world.settings(namespace=store.namespace, generation=store.generation, part_bytes=128)
    processes = multiprocessing.get_context("spawn")
    reports, senders = zip(*(processes.Pipe(duplex=False) for _ in range(4)), strict=True)
    work = [
        (put_and_tell, range(20)),
        (put_and_tell, range(10, 30)),
        (count_damaged, range(30)),
        (count_damaged, range(30)),
    ]
    running = [
        processes.Process(target=target, args=(settings, seeds, sender))
        for (target, seeds), sender in zip(work, senders, strict=True)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(90)
        assert process.exitcode == 0
    assert [report.recv() for report in reports[2:]] == [0, 0]
    assert list(store.keys()) == [key_of(seed) for seed in range(30)]
    assert all(is_intact(store, key) for key in map(key_of, range(30)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_of_a_data_loader(method: str) -> None:
    """Spawned ones open a connection of their own; forked ones are refused with the reason instead of hanging."""
    store = shared_world().store()
    keys = [key_of(seed) for seed in range(8)]
    for key in keys:
        store.put(key, sample_of(int(key.removeprefix("key"))))
    loader = DataLoader(StoredKeys(store, keys), num_workers=2, batch_size=None, multiprocessing_context=method)
    if method == "fork":
        with pytest.raises(ValueError, match=r"a forked process cannot use Mooncake.*data\.num_workers=0"):
            list(loader)
    else:
        results = list(loader)
        assert all(intact for intact, _ in results) and len({pid for _, pid in results}) == 2
    assert is_intact(store, keys[0])


@pytest.mark.slow
def test_master_killed(own_world: World) -> None:
    store = own_world.store()
    store.put(key_of(1), sample_of(1))
    kill(own_world.master)
    actions: dict[str, Any] = {
        "get": lambda: store.get(key_of(1)),
        "put": lambda: store.put(key_of(2), sample_of(2)),
        "keys": store.keys,
        "room": lambda: store.ensure_room(1),
        "another store": own_world.store,
    }
    for action in actions.values():
        started = time.monotonic()
        with pytest.raises(MasterUnreachableError, match=r"mooncake_master.*store\.(master_address|admin_url)"):
            action()
        assert time.monotonic() - started < 15


def test_segment_killed(own_world: World) -> None:
    """A sample whose memory is gone is an error at once, and missing when the master has noticed (its -client_ttl)."""
    store = own_world.store()
    store.put(key_of(1), sample_of(1))
    assert is_intact(store, key_of(1))
    kill(own_world.segment)
    with pytest.raises(
        (TransferError, MissingSampleError), match=r"The process that holds the segment|Capture it first"
    ):
        store.get(key_of(1))


def test_lease_too_short(tmp_path: Path) -> None:
    world = World(tmp_path, num_bytes=64 * 2**20, lease_s=0.001)
    try:
        with pytest.raises(LeaseExpiredError, match=r"LEASE_EXPIRED.*-default_kv_lease_ttl.*store\.part_bytes"):
            store = world.store()  # on a busy machine its own manifest can come too late already
            store.put("long", sample_of(1, num_tokens=2**19))
            for _ in range(20):
                store.get("long")
    finally:
        world.close()


def test_no_master_is_told_quickly() -> None:
    started = time.monotonic()
    with pytest.raises(MasterUnreachableError, match=r"store\.admin_url"):
        shared_world().store(master_address="127.0.0.1:9", admin_url="http://127.0.0.1:9")
    with pytest.raises(
        MasterUnreachableError, match=r"no mooncake_master answers at store\.master_address=127\.0\.0\.1:9"
    ):
        shared_world().store(master_address="127.0.0.1:9")
    assert time.monotonic() - started < 10
    with pytest.raises(ValueError, match=r"master_address='nowhere': give host:port"):
        shared_world().store(master_address="nowhere")


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_is_an_exception_with_its_mend(code: int) -> None:
    name, kind, mend = CODES[code]
    error = error_of(code, "get of 'key'")
    assert type(error) is kind and kind is not MooncakeError
    assert str(error) == f"get of 'key' failed: Mooncake returned {code} ({name}). {mend}" and mend.endswith(
        (".", ").")
    )


def test_an_unknown_code_is_an_error_too() -> None:
    assert isinstance(error_of(-4711, "put"), MooncakeError)


def test_settings_reach_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a recorder in Mooncake's place: there is no RDMA device here."""
    calls = []

    class Recorder:
        def setup(self, *arguments: Any) -> int:
            calls.append(arguments)
            return -600

    monkeypatch.setattr("mooncake.store.MooncakeDistributedStore", Recorder)
    world = shared_world()
    with pytest.raises(MooncakeError, match="by rdma failed"):
        world.store(protocol="rdma", rdma_devices="mlx5_0,mlx5_1", local_hostname="10.0.0.7")
    assert calls == [("10.0.0.7", "P2PHANDSHAKE", 0, 0, "rdma", "mlx5_0,mlx5_1", world.master.address)]
