"""Writers that are killed, readers that read meanwhile, workers that inherit a store: real processes, real SIGKILL."""

import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from stored_samples import (
    StoredKeys,
    die_at,
    is_intact,
    key_of,
    open_store,
    read_until_complete,
    sample_of,
    write_and_tell,
)
from torch.utils.data import DataLoader


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServerContext]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dspark_lab.store.disk"])  # torch is imported once, not by every process
    yield context


def loose_files(root: Path) -> set[str]:
    """What lies in the store without being named by a log."""
    named = set()
    for log in (root / "index").glob("*.jsonl"):
        content = log.read_bytes()
        assert not content or content.endswith(b"\n"), f"{log} is torn"
        named |= {json.loads(line)["shard"] for line in content.splitlines()}
    return ({path.name for path in (root / "shards").iterdir()} - named) | set(os.listdir(root / "staging"))


def drain(receiver: Connection) -> set[str]:
    told = set()
    try:
        while True:
            told.add(receiver.recv())
    except EOFError:
        return told
    finally:
        receiver.close()


def test_killed_at_random_moments(processes: ForkServerContext, tmp_path: Path) -> None:
    chance = random.Random(0)
    acknowledged: set[str] = set()
    for turn in range(8):
        receiver, sender = processes.Pipe(duplex=False)
        seeds = range(1000 * turn, 1000 * turn + 1000)  # more than it can write before it is killed
        child = processes.Process(target=write_and_tell, args=(tmp_path, seeds, sender))
        child.start()
        sender.close()
        assert receiver.recv() == "ready"
        time.sleep(chance.uniform(0.0, 0.12))
        child.kill()
        child.join()
        assert child.exitcode == -9
        child.close()
        acknowledged |= drain(receiver)
        with open_store(tmp_path, mode="read") as reader:
            keys = reader.keys()
            assert acknowledged <= set(keys)
            assert all(is_intact(reader, key) for key in keys)
    assert acknowledged, "no writer was killed at work"
    wanted = [seed for turn in range(8) for seed in range(1000 * turn, 1000 * turn + 10)]
    with open_store(tmp_path) as second:
        assert loose_files(tmp_path) == set()
        for seed in wanted:
            second.put(key_of(seed), sample_of(seed))
    with open_store(tmp_path, mode="read") as reader:
        keys = reader.keys()
        assert acknowledged | {key_of(seed) for seed in wanted} <= set(keys)
        assert all(is_intact(reader, key) for key in keys)


@pytest.mark.parametrize("moment", ["staged", "renamed", "line torn"])
def test_killed_at_each_step_of_a_publication(processes: ForkServerContext, tmp_path: Path, moment: str) -> None:
    child = processes.Process(target=die_at, args=(moment, tmp_path))
    child.start()
    child.join()
    assert child.exitcode == -9
    with open_store(tmp_path, mode="read") as reader:
        assert reader.keys() == [key_of(0), key_of(1)]
        assert all(is_intact(reader, key) for key in reader.lengths())
    with open_store(tmp_path) as second:
        assert loose_files(tmp_path) == set()
        second.put(key_of(2), sample_of(2))
    with open_store(tmp_path, mode="read") as reader:
        assert [is_intact(reader, key_of(seed)) for seed in range(3)] == [True] * 3


def test_readers_see_only_whole_samples_while_two_writers_go_on(processes: ForkServerContext, tmp_path: Path) -> None:
    open_store(tmp_path).close()
    pipes, children = [], []
    for target, argument in (
        *[(read_until_complete, 60)] * 3,
        (write_and_tell, range(0, 40)),
        (write_and_tell, range(20, 60)),  # 20 keys come from both writers
    ):
        receiver, sender = processes.Pipe(duplex=False)
        child = processes.Process(target=target, args=(tmp_path, argument, sender))
        child.start()
        sender.close()
        assert receiver.recv() == "ready"  # the readers look before the first writer begins
        pipes.append(receiver)
        children.append(child)
    reports = [receiver.recv() for receiver in pipes[:3]]
    for child in children:
        child.join()
        assert child.exitcode == 0
    for receiver in pipes:
        receiver.close()
    assert all(not damaged for _, damaged in reports)
    assert max(looks for looks, _ in reports) > 2, "no reader looked while the writers were at work"


@pytest.mark.parametrize("context", ["fork", "forkserver"])
@pytest.mark.parametrize("mode", ["read", "write"])
def test_data_loader_workers(tmp_path: Path, context: str, mode: str) -> None:
    keys = [key_of(seed) for seed in range(24)]
    with open_store(tmp_path) as store:
        for seed, key in enumerate(keys):
            store.put(key, sample_of(seed))
    with open_store(tmp_path, mode=mode) as store:
        assert is_intact(store, keys[0])  # the parent has the shard open when workers are forked
        loader = DataLoader(StoredKeys(store, keys), batch_size=None, num_workers=2, multiprocessing_context=context)
        seen = list(loader)
    assert [intact for intact, _ in seen] == [True] * len(keys)
    assert os.getpid() not in {int(pid) for _, pid in seen}


def test_forked_child_leaves_the_parents_buffer_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(key_of(0), sample_of(0))
    store.sync()
    store.put(key_of(1), sample_of(1))
    child = os.fork()
    if child == 0:
        try:
            store.put(key_of(2), sample_of(2))
            store.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    store.put(key_of(3), sample_of(3))
    store.close()
    published = [
        sample[0]
        for log in (tmp_path / "index").glob("*.jsonl")
        for line in log.read_text().splitlines()
        for sample in json.loads(line)["samples"]
    ]
    assert sorted(published) == [key_of(seed) for seed in range(4)]
    with open_store(tmp_path, mode="read") as reader:
        assert all(is_intact(reader, key) for key in reader.lengths())


def test_sweep_spares_a_living_writer(tmp_path: Path) -> None:
    living = open_store(tmp_path)
    living.put(key_of(0), sample_of(0))
    living.sync()
    (half_written,) = (tmp_path / "staging").iterdir()
    (half_written / "shard").write_bytes(b"in progress")
    renamed = next((tmp_path / "shards").iterdir())
    unlisted = renamed.with_name(renamed.name.replace("000000", "000001"))
    unlisted.write_bytes(b"renamed, line not yet appended")
    open_store(tmp_path).close()
    assert (half_written / "shard").exists() and unlisted.exists()
    living.close()
    open_store(tmp_path).close()
    assert not half_written.exists() and not unlisted.exists()
    with open_store(tmp_path, mode="read") as reader:
        assert is_intact(reader, key_of(0))
