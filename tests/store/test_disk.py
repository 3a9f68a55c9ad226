"""What can go wrong on a disk, and what the store says about it."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stored_samples import MANIFEST, is_intact, key_of, open_store, sample_of

from dspark_lab.store import disk, shard
from dspark_lab.store.disk import read_manifest
from dspark_lab.store.protocol import CorruptSampleError, MissingSampleError, NonFiniteSampleError


def only_shard(root: Path) -> Path:
    (path,) = (root / "shards").iterdir()
    return path


def flip_byte(path: Path, offset: int) -> None:
    with path.open("rb+") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def offset_of(path: Path, tensor: str) -> int:
    """Where the tensor's bytes begin in a safetensors file: length of the header, header, data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length + json.loads(file.read(length))[tensor]["data_offsets"][0]


@pytest.mark.parametrize("tensor", ["token_ids", "loss_mask", "hidden_states", "last_hidden_state"])
def test_flipped_byte_is_found_and_the_sample_captured_again(root: Path, tensor: str) -> None:
    path = only_shard(root)
    flip_byte(path, offset_of(path, f"{key_of(3)}/{tensor}"))
    reader, writer = open_store(root, mode="read"), open_store(root)
    for store in (reader, writer):
        with pytest.raises(CorruptSampleError, match=f"'{key_of(3)}' in {path} is corrupt: its checksum .*capture it"):
            store.get(key_of(3))
    assert all(is_intact(reader, key_of(seed)) for seed in (0, 1, 2, 4))
    writer.delete(key_of(3))
    writer.put(key_of(3), sample_of(3))
    writer.close()
    assert is_intact(writer, key_of(3)) and is_intact(reader, key_of(3))


@pytest.mark.parametrize("damage", ["header", "truncated", "empty", "gone"])
def test_damaged_shard_is_named(root: Path, damage: str) -> None:
    path = only_shard(root)
    if damage == "header":
        flip_byte(path, 8)
    elif damage == "gone":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1 if damage == "truncated" else 0)
    with open_store(root) as store:
        for seed in range(5):
            with pytest.raises(CorruptSampleError, match=f"'{key_of(seed)}' in {path} is corrupt"):
                store.get(key_of(seed))
            store.delete(key_of(seed))
            store.put(key_of(seed), sample_of(seed))
    assert all(is_intact(store, key_of(seed)) for seed in range(5))
    assert not path.exists()


def test_states_spoilt_before_the_checksum_are_refused_at_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "admitted", lambda key, sample, manifest: sample)
    sample = sample_of(5)
    sample.hidden_states[2, 1, 3] = float("inf")
    with open_store(tmp_path) as store:
        store.put("bad", sample)
    with open_store(tmp_path, mode="read") as reader, pytest.raises(NonFiniteSampleError, match="'bad': hidden_states"):
        reader.get("bad")


def test_shards_of_another_shape_are_refused(root: Path) -> None:
    """A manifest edited by hand: the states tell."""
    other = replace(MANIFEST, hidden_size=4)
    (root / "manifest.json").write_text(other.to_json())
    with (
        open_store(root, manifest=other, mode="read") as reader,
        pytest.raises(CorruptSampleError, match=r"\[1, 3, 8\] instead of \[1, 3, 4\]"),
    ):
        reader.get(key_of(0))


def test_torn_line_is_ignored_and_a_damaged_one_named(root: Path) -> None:
    (log,) = (root / "index").iterdir()
    with log.open("ab") as file:
        file.write(b'{"shard": "x.safetensors", "samples": [["ghost", 3,')
    with open_store(root, mode="read") as reader:
        assert reader.keys() == [key_of(seed) for seed in range(5)]
        with log.open("ab") as file:
            file.write(b"\n")
        with pytest.raises(ValueError, match=f"{log} is damaged at byte .*Remove this file"):
            reader.keys()
    log.unlink()
    with open_store(root) as store:  # the mend works: nothing is left, everything can be captured again
        assert store.keys() == [] and list((root / "shards").iterdir()) == []
        store.put(key_of(0), sample_of(0))
    assert is_intact(store, key_of(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"revision": "r2"}, "revision: stored 'r1', wanted 'r2'"),
        ({"layer_ids": (0, 1, 2)}, r"layer_ids: stored \(1, 2, 3\), wanted \(0, 1, 2\)"),
        ({"dtype": "float32"}, "dtype: stored 'bfloat16', wanted 'float32'"),
    ],
)
@pytest.mark.parametrize("mode", ["read", "write"])
def test_store_of_another_capture_is_refused(root: Path, mode: str, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"{root} holds states of another capture .*{message}"):
        open_store(root, manifest=replace(MANIFEST, **change), mode=mode)


def test_manifest_that_is_no_manifest(root: Path) -> None:
    assert read_manifest(root) == MANIFEST
    (root / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=f"{root}/manifest.json.*Restore this file"):
        open_store(root)


def test_reading_needs_a_store(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} is not a store.*Capture into it first"):
        open_store(tmp_path, mode="read")
    assert list(tmp_path.iterdir()) == []


def test_reader_does_not_write(root: Path) -> None:
    with open_store(root, mode="read") as reader:
        for action in (lambda: reader.put("new", sample_of(1)), lambda: reader.delete(key_of(1))):
            with pytest.raises(ValueError, match=r"mode='read'.*mode='write'"):
                action()


def test_only_wanted_tensors_are_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    class CountingShard:
        def __init__(self, path: Path, framework: str) -> None:
            self.shard = real_open(path, framework=framework)

        def get_tensor(self, name: str) -> torch.Tensor:
            tensor = self.shard.get_tensor(name)
            # A view of the file's map, not a copy: its storage is no allocation but lies between the map's bounds.
            read.append((name, tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))
            assert is_mapped(tensor.data_ptr(), only_shard(root))
            return tensor

    real_open = shard.safe_open
    monkeypatch.setattr(shard, "safe_open", CountingShard)
    with open_store(root, mode="read") as reader:
        assert len(reader.lengths()) == 5 and read == []
        reader.get(key_of(4))
    assert {name for name, _, _ in read} == {f"{key_of(4)}/{name}" for name in shard.TENSORS}
    assert sum(num_bytes for _, num_bytes, _ in read) == 5 * MANIFEST.bytes_per_token


def is_mapped(address: int, path: Path) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, *_, name = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < end:
            return name == str(path)
    return False


def test_few_shards_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "MAX_OPEN_SHARDS", 2)
    with open_store(tmp_path, shard_bytes=1) as store:
        for seed in range(5):
            store.put(key_of(seed), sample_of(seed))
    samples = {seed: store.get(key_of(seed)) for seed in range(5)}
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 5  # the samples hold theirs
    assert all(torch.equal(samples[seed].hidden_states, sample_of(seed).hidden_states) for seed in range(5))
    del samples
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 2


def test_empty_shard_is_reclaimed(root: Path) -> None:
    reader = open_store(root, mode="read")
    assert is_intact(reader, key_of(0))
    with open_store(root) as store:
        for seed in range(4):
            store.delete(key_of(seed))
            assert only_shard(root).exists() and is_intact(store, key_of(4))
        store.delete(key_of(4))
        assert store.keys() == [] and list((root / "shards").iterdir()) == []
    assert reader.keys() == []
    assert str(root) not in Path("/proc/self/maps").read_text()  # else the room would not be free
    with pytest.raises(MissingSampleError):
        reader.get(key_of(0))


def test_deletion_survives_a_writer_killed_before_the_reclaim(root: Path) -> None:
    path = only_shard(root)
    kept = path.read_bytes()
    with open_store(root) as store:
        for seed in range(5):
            store.delete(key_of(seed))
    path.write_bytes(kept)  # as if it had been killed between the tombstone and the unlink
    with open_store(root) as store:
        assert store.keys() == [] and not path.exists()


def test_key_of_two_writers_is_deleted_once_and_for_all(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    for store in (first, second):
        store.put(key_of(1), sample_of(1))
    first.close()
    second.close()
    assert first.keys() == second.keys() == [key_of(1)]
    first.delete(key_of(1))
    assert first.keys() == second.keys() == [] and list((tmp_path / "shards").iterdir()) == []
    first.close()


def test_pickled_store_reads_and_leaves_the_buffer_behind(root: Path) -> None:
    store = open_store(root)
    store.put("buffered", sample_of(7))
    copy = pickle.loads(pickle.dumps(store))
    assert copy.keys() == [key_of(seed) for seed in range(5)] and is_intact(copy, key_of(2))
    store.close()
    assert copy.lengths()["buffered"] == 8


def test_settings_are_typed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shard_bytes"):
        open_store(tmp_path, shard_bytes="many")
    with pytest.raises(ValueError, match="mode"):
        open_store(tmp_path, mode="append")
