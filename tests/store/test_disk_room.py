"""A disk that fills: told beforehand, stopped at the reserve, and survived when another program takes the rest."""

import os
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stored_samples import MANIFEST, is_intact, key_of, open_store, sample_of

from dspark_lab.store import disk, durable
from dspark_lab.store.disk import DiskStore
from dspark_lab.store.protocol import NoRoomError

Usage = namedtuple("Usage", ["total", "used", "free"])


def test_estimate_is_near_what_the_disk_holds(tmp_path: Path) -> None:
    wide = replace(MANIFEST, hidden_size=576)
    with open_store(tmp_path, manifest=wide) as store:
        for seed in range(20):
            states = torch.randn(100, 3, 576)
            store.put(
                key_of(seed),
                replace(sample_of(seed, num_tokens=100), hidden_states=states, last_hidden_state=states[:, 0]),
            )
    used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert used <= store.estimate_bytes(2000, num_samples=20) <= 1.05 * used


def test_no_room_is_told_before_writing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(path for path in root.rglob("*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 5000, 5000))
    store = open_store(root, reserve_bytes=4000)
    store.ensure_room(1000)
    with pytest.raises(
        NoRoomError, match=f"{root}: 1,001 bytes needed, 5,000 free, .*reserve_bytes=4,000.*larger disk"
    ):
        store.ensure_room(1001)
    store.put("new", sample_of(5))
    with pytest.raises(NoRoomError, match=str(root)):
        store.sync()
    assert sorted(path for path in root.rglob("*")) == before
    assert all(is_intact(store, key_of(seed)) for seed in range(5))
    monkeypatch.undo()
    store.close()  # room was made: nothing is lost
    assert store.lengths()["new"] == 6


def test_no_room_ends_a_with_block_by_that_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 0))
    with pytest.raises(NoRoomError) as error, open_store(tmp_path, shard_bytes=1) as store:
        store.put("new", sample_of(5))
    assert "1 bytes needed" not in str(error.value) and "0 free" in str(error.value)
    assert list((tmp_path / "shards").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(store: DiskStore) -> int:
    """Put samples of about 70 kB until the store refuses; the number of the refused one."""
    for seed in range(1000):
        store.put(key_of(seed), sample_of(seed, num_tokens=1000))
    raise AssertionError("the disk was not full")


def test_real_disk_stops_at_the_reserve(small_disk: Path) -> None:
    with pytest.raises(NoRoomError), open_store(small_disk, shard_bytes=200_000, reserve_bytes=2**20) as store:
        fill(store)
    assert 2**20 <= shutil.disk_usage(small_disk).free < 2**20 + 400_000
    assert_readable(small_disk)


@pytest.mark.parametrize("num_filler_bytes", [0, 50_000, 100_000])
def test_real_disk_that_another_program_fills(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, num_filler_bytes: int
) -> None:
    monkeypatch.setattr(disk, "require_room", lambda *args, **kwargs: None)  # there was room when it looked
    (small_disk / "other").write_bytes(b"x" * num_filler_bytes)
    with (
        pytest.raises(NoRoomError, match=f"{small_disk}: .* bytes needed"),
        open_store(small_disk, shard_bytes=200_000) as store,
    ):
        fill(store)
    assert_readable(small_disk)


def test_line_that_does_not_fit_is_taken_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(root)
    store.put("first", sample_of(5))
    store.sync()
    real_write = os.write

    def half(descriptor: int, line: bytes) -> int:
        if len(line) < 20:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, line[: len(line) // 2])

    store.put("second", sample_of(6))
    with monkeypatch.context() as patch, pytest.raises(NoRoomError):
        patch.setattr(os, "write", half)
        store.sync()
    assert len(list((root / "shards").iterdir())) == 2
    store.close()
    assert {"first", "second"} <= set(open_store(root, mode="read").keys())


def assert_readable(root: Path) -> None:
    with open_store(root, mode="read") as reader:
        keys = reader.keys()
        assert len(keys) > 10
        for key in keys:
            put = sample_of(int(key.removeprefix("key")), num_tokens=1000)
            assert torch.equal(reader.get(key).hidden_states, put.hidden_states)


def test_is_full_knows_both_libraries() -> None:
    assert durable.is_full(OSError(28, "No space left on device")) and durable.is_full(OSError(122, "quota"))
    assert durable.is_full(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert not durable.is_full(OSError(13, "Permission denied"))
