"""What is Mooncake's own in ``store=mooncake``, against real processes; the rest is in the contract."""

import fnmatch
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mooncake_world import World, needs_mooncake, shared_world, spoil
from stored_samples import MANIFEST, is_intact, key_of, sample_of

from dspark_lab.cluster.doctor.look import Look
from dspark_lab.records import TargetSample
from dspark_lab.store.mooncake_admin import object_names
from dspark_lab.store.protocol import CorruptSampleError, MissingSampleError, NoRoomError

pytestmark = needs_mooncake


@pytest.fixture
def world() -> World:
    return shared_world()


@pytest.fixture
def small_world(tmp_path: Path) -> Iterator[World]:
    """One of its own, with 16 MiB."""
    world = World(tmp_path, num_bytes=16 * 2**20)
    yield world
    world.close()


def objects_of(world: World, store: Any) -> set[str]:
    prefix = f"{store.namespace}/{store.generation}/"
    return {name.removeprefix(prefix) for name in object_names(world.master.admin_url, prefix=prefix)}


def test_a_restarted_run_neither_reads_nor_deletes_anothers(world: World) -> None:
    first, other = world.store(namespace="run"), world.store(namespace="run-2")
    for store in (first, other):
        store.put("key", sample_of(1))
    second = world.store(namespace="run")
    assert list(second.keys()) == [] and objects_of(world, first) == set()  # the crashed one's orphans are gone
    with pytest.raises(MissingSampleError):
        first.get("key")
    second.put("key", sample_of(2))
    with pytest.raises(MissingSampleError):
        first.delete("key")
    assert torch.equal(second.get("key").token_ids, sample_of(2).token_ids)
    assert torch.equal(other.get("key").token_ids, sample_of(1).token_ids)


def test_a_generation_is_joined(world: World) -> None:
    started = world.store()
    started.put("key", sample_of(1))
    joined = world.store(namespace=started.namespace, generation=started.generation)
    assert joined.lengths() == {"key": sample_of(1).token_ids.numel()}
    joined.delete("key")
    assert list(started.keys()) == []
    with pytest.raises(ValueError, match=r"generation 'gone' of .* is not in Mooncake"):
        world.store(generation="gone")
    named = {"namespace": started.namespace, "generation": "named"}
    world.store(**named, founds=True).put("key", sample_of(1))
    assert list(started.keys()) == [] and list(world.store(**named, founds=True).keys()) == ["key"]


def test_the_manifest_is_checked(world: World) -> None:
    store = world.store()
    joining = {"namespace": store.namespace, "generation": store.generation}
    with pytest.raises(ValueError, match="target: stored 'tiny', wanted 'big'"):
        world.store(manifest=replace(MANIFEST, target="big"), **joining)
    name = f"{store.namespace}/{store.generation}/manifest"
    spoil(world, name, lambda text: text.replace(b'"schema_version": 1', b'"schema_version": 99'))
    with pytest.raises(ValueError, match="schema_version=99: this code reads version 1"):
        world.store(**joining)
    spoil(world, name, lambda text: text[:20])
    with pytest.raises(ValueError, match="manifest of generation"):
        world.store(**joining)


def flipped(position: int) -> Callable[[bytearray], bytearray]:
    def flip(content: bytearray) -> bytearray:
        content[position] ^= 1
        return content

    return flip


WHOLE = 64 * 2**20
DAMAGES: dict[str, tuple[int, str, Callable[[bytearray], bytes | bytearray | None], str]] = {
    "payload": (WHOLE, "head/key0007", flipped(-70), "checksum of part 1 of 1 differs"),
    "truncated": (WHOLE, "head/key0007", lambda content: content[:-1], r"it has [\d,]+ of [\d,]+ bytes"),
    "longer": (WHOLE, "head/key0007", lambda content: content + b"x", r"it has [\d,]+ of [\d,]+ bytes"),
    "head alone left": (WHOLE, "head/key0007", lambda content: content[:64], r"it has 0 of [\d,]+ bytes"),
    "stump": (WHOLE, "head/key0007", lambda content: content[:10], "its head has 10 bytes"),
    "number of tokens": (WHOLE, "head/key0007", flipped(16), "its head is damaged"),
    "form": (WHOLE, "head/key0007", flipped(8), "written in form 3, this code reads form 2"),
    "checksums": (WHOLE, "head/key0007", flipped(64), "the checksums in its head are damaged"),
    "not ours": (WHOLE, "head/key0007", lambda content: b"hello", "does not begin as one of this store"),
    "a part": (128, "part/*/1/key0007", flipped(5), "checksum of part 2 of"),
    "a truncated part": (128, "part/*/1/key0007", lambda content: content[:-8], "parts of"),
    "a part gone": (128, "part/*/1/key0007", lambda content: None, "has lost a part"),
    "the head of parts": (128, "head/key0007", flipped(64), "the checksums in its head are damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_mended(world: World, damage: str) -> None:
    part_bytes, name, change, problem = DAMAGES[damage]
    store = world.store(part_bytes=part_bytes)
    store.put(key_of(7), sample_of(7))
    store.put(key_of(8), sample_of(8))
    (name,) = fnmatch.filter(objects_of(world, store), name)
    spoil(world, f"{store.namespace}/{store.generation}/{name}", change)
    with pytest.raises(CorruptSampleError, match=f"sample 'key0007'.*{problem}"):
        store.get(key_of(7))
    assert is_intact(store, key_of(8))
    store.delete(key_of(7))
    assert not any("key0007" in name for name in objects_of(world, store))
    store.put(key_of(7), sample_of(7))
    assert is_intact(store, key_of(7))


def test_a_sample_under_anothers_key_is_refused(world: World) -> None:
    store = world.store()
    store.put(key_of(7), sample_of(7))
    store.put(key_of(8), sample_of(8))
    path = f"{store.namespace}/{store.generation}/head/"
    other = world.stranger.get(path + key_of(8))
    spoil(world, path + key_of(7), lambda content: other)
    with pytest.raises(CorruptSampleError, match="its head is damaged or another sample's"):
        store.get(key_of(7))


def test_the_head_publishes_the_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store = world.store(part_bytes=128)
    put, told = store._client.put, []

    def watched(names: list[str], buffers: list[torch.Tensor]) -> None:
        told.append((list(store.keys()), len(names)))
        put(names, buffers)

    monkeypatch.setattr(store._client, "put", watched)
    store.put(key_of(7), sample_of(7))
    assert [keys for keys, _ in told] == [[], []] and told[0][1] > 1 and told[1][1] == 1
    assert list(store.keys()) == [key_of(7)]


def test_what_could_not_be_published_leaves_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store = world.store(part_bytes=128)
    put = store._client.put

    def fail_at_the_head(names: list[str], buffers: list[torch.Tensor]) -> None:
        if len(names) == 1:
            raise NoRoomError("full")
        put(names, buffers)

    monkeypatch.setattr(store._client, "put", fail_at_the_head)
    with pytest.raises(NoRoomError):
        store.put(key_of(7), sample_of(7))
    assert objects_of(world, store) == {"manifest"}


@pytest.mark.parametrize("first_to_publish", ["the one", "the other"])
def test_two_writers_of_one_key_share_no_part(
    world: World, monkeypatch: pytest.MonkeyPatch, first_to_publish: str
) -> None:
    """The slower leaves nothing, wherever the faster was when it began; Mooncake shows parts that are still on their way."""
    one = world.store(part_bytes=128)
    other = world.store(namespace=one.namespace, generation=one.generation, part_bytes=128)
    put, parts_of_one = one._client.put, []

    def overtaken(names: list[str], buffers: list[torch.Tensor]) -> None:
        is_head = len(names) == 1
        if is_head and first_to_publish == "the other":
            other.put(key_of(7), sample_of(7))
        if not is_head:
            parts_of_one.extend(names)
        put(names, buffers)

    monkeypatch.setattr(one._client, "put", overtaken)
    one.put(key_of(7), sample_of(7))
    other.put(key_of(7), sample_of(7))
    parts = {name for name in objects_of(world, one) if name.startswith("part/")}
    kept = {name.removeprefix(f"{one.namespace}/{one.generation}/") for name in parts_of_one} & parts
    assert len(parts) == len(parts_of_one) and kept == (parts if first_to_publish == "the one" else set())
    assert is_intact(one, key_of(7)) and is_intact(other, key_of(7))
    one.delete(key_of(7))
    assert objects_of(world, one) == {"manifest"}


def test_a_full_segment(small_world: World) -> None:
    """Whole samples stay, the one that does not fit leaves nothing, and a deletion makes room."""
    store = small_world.store(part_bytes=2**20)
    sample = sample_of(0, num_tokens=2**16)  # 4.3 MB, in 5 parts
    with pytest.raises(NoRoomError, match=r"NO_AVAILABLE_HANDLE.*free of 16,777,216 in all segments.*store=disk"):
        for seed in range(10):
            store.put(key_of(seed), sample)
    kept = store.keys()
    assert len(kept) == 3
    parts = [name for name in objects_of(small_world, store) if name.startswith("part/")]
    assert {name.rpartition("/")[2] for name in parts} == set(kept)
    with pytest.raises(NoRoomError, match="bytes needed"):
        store.ensure_room(store.estimate_bytes(2**16))
    store.delete(kept[0])
    store.ensure_room(store.estimate_bytes(2**16))
    store.put("again", sample)
    assert torch.equal(store.get("again").hidden_states, sample.hidden_states)


def test_pins_withstand_eviction(small_world: World) -> None:
    store = small_world.store()
    for seed in range(5):
        store.put(key_of(seed), sample_of(seed, num_tokens=2**14))
    stranger = small_world.stranger
    filler = [f"filler{number}" for number in range(60)]
    for name in filler:
        stranger.put(name, bytes(2**20))
    assert 0 < sum(stranger.is_exist(name) == 1 for name in filler) < len(filler)
    for seed in range(5):
        wanted = sample_of(seed, num_tokens=2**14)
        assert torch.equal(store.get(key_of(seed)).last_hidden_state, wanted.last_hidden_state)


def test_states_are_read_without_a_copy_and_memory_is_used_again(world: World) -> None:
    store = world.store()
    for seed in range(3):
        store.put(key_of(seed), sample_of(seed, num_tokens=100))
    gc.collect()
    slabs = {slab.pointer: slab for slab in store._client._slabs}

    def home(sample: TargetSample) -> int:
        """The registered buffer that the sample's states lie in."""
        (found,) = [p for p, s in slabs.items() if 0 <= sample.hidden_states.data_ptr() - p < s.capacity]
        return found

    first = store.get(key_of(0))
    second = store.get(key_of(1))
    assert torch.equal(first.hidden_states, sample_of(0, num_tokens=100).hidden_states)
    assert torch.equal(second.hidden_states, sample_of(1, num_tokens=100).hidden_states)
    place, kept = home(first), first.hidden_states[3]
    del first
    assert place not in {slab.pointer for slab in store._client._slabs}  # a view of it lives
    del kept
    assert place in {slab.pointer for slab in store._client._slabs}
    assert home(store.get(key_of(2))) == place


class TestLargeSample:
    pytestmark = pytest.mark.slow

    def test_0_70_gb_in_parts(self, tmp_path: Path) -> None:
        """8192 tokens of Kimi K3's size: five layers and the last state, H = 7168."""
        manifest = replace(MANIFEST, layer_ids=(1, 2, 3, 4, 5), hidden_size=7168)
        rows = torch.arange(8192, dtype=torch.bfloat16)[:, None]
        columns = torch.randn(7168).to(torch.bfloat16)
        sample = TargetSample(
            token_ids=torch.arange(8192),
            loss_mask=torch.arange(8192) % 2 == 0,
            hidden_states=(rows * columns)[:, None].expand(-1, 5, -1),
            last_hidden_state=rows + columns,
        )
        assert sample.num_bytes > 0.70e9
        world = World(tmp_path, num_bytes=2**30)
        try:
            store = world.store(manifest=manifest)
            store.put("large", sample)
            parts = [name for name in objects_of(world, store) if name.startswith("part/")]
            assert len(parts) == -(-sample.num_bytes // store.part_bytes)
            got = store.get("large")
            for name in ("token_ids", "loss_mask", "hidden_states", "last_hidden_state"):
                assert torch.equal(getattr(got, name), getattr(sample, name)), name
            store.delete("large")
            assert objects_of(world, store) == {"manifest"}
        finally:
            world.close()


def test_the_doctor_measures_put_and_get_and_leaves_nothing(world: World) -> None:
    settings = world.settings()
    connection = {name: settings[name] for name in ("master_address", "protocol", "rdma_devices", "local_hostname")}
    put, get = Look().transfer(connection, 2**22)
    assert 1e6 < put < 1e12 and 1e6 < get < 1e12
    assert not object_names(world.master.admin_url, prefix="dspark_lab-doctor")
