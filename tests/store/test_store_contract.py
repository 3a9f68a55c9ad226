"""What every store promises. A new store joins by one line in ``STORES``."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mooncake_world import needs_mooncake, shared_world

from dspark_lab.records import TargetSample
from dspark_lab.store.disk import DiskStore
from dspark_lab.store.memory import MemoryStore
from dspark_lab.store.protocol import HiddenStateStore, Manifest, MissingSampleError, NonFiniteSampleError, NoRoomError

MakeSample = Callable[..., TargetSample]
MakeStore = Callable[[Path, Manifest], HiddenStateStore]
STORES: dict[str, MakeStore] = {
    "memory": lambda root, manifest: MemoryStore(manifest=manifest),
    "disk": lambda root, manifest: DiskStore(root, manifest=manifest),
    "disk_shard_each": lambda root, manifest: DiskStore(root, manifest=manifest, shard_bytes=1),
    "mooncake": lambda root, manifest: shared_world().store(manifest=manifest),
    "mooncake_in_parts": lambda root, manifest: shared_world().store(manifest=manifest, part_bytes=64),
}


@pytest.fixture(params=[pytest.param(name, marks=needs_mooncake if "mooncake" in name else ()) for name in STORES])
def make_store(request: pytest.FixtureRequest) -> MakeStore:
    return STORES[request.param]


@pytest.fixture
def store(make_store: MakeStore, manifest: Manifest, tmp_path: Path) -> Iterator[HiddenStateStore]:
    with make_store(tmp_path, manifest) as opened:
        yield opened


def assert_same(got: TargetSample, put: TargetSample) -> None:
    for name in ("token_ids", "loss_mask", "hidden_states", "last_hidden_state"):
        mine, theirs = getattr(got, name), getattr(put, name)
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name


@pytest.mark.parametrize("published", [False, True])
def test_round_trip_is_bit_exact(store: HiddenStateStore, make_sample: MakeSample, published: bool) -> None:
    samples = {f"key{seed}": make_sample(seed) for seed in range(20)}
    for key, sample in samples.items():
        store.put(key, sample)
    if published:
        store.sync()
    for key, sample in samples.items():
        assert_same(store.get(key), sample)
    assert list(store.keys()) == sorted(samples)
    assert store.lengths() == {key: sample.token_ids.numel() for key, sample in samples.items()}


@pytest.mark.parametrize("num_tokens", [1, 2, 1000])
def test_every_length(store: HiddenStateStore, make_sample: MakeSample, num_tokens: int) -> None:
    sample = make_sample(0, num_tokens=num_tokens)
    store.put("key", sample)
    store.sync()
    assert_same(store.get("key"), sample)


def test_states_are_cast_to_the_manifest(store: HiddenStateStore, make_sample: MakeSample) -> None:
    sample = make_sample(5, dtype=torch.float32)
    store.put("key", sample)
    store.sync()
    assert store.get("key").hidden_states.dtype == torch.bfloat16
    assert torch.equal(store.get("key").hidden_states, sample.hidden_states.to(torch.bfloat16))


def test_float32_is_kept(make_store: MakeStore, manifest: Manifest, make_sample: MakeSample, tmp_path: Path) -> None:
    sample = make_sample(5, dtype=torch.float32)
    with make_store(tmp_path, replace(manifest, dtype="float32")) as store:
        store.put("key", sample)
        store.sync()
        assert_same(store.get("key"), sample)


def test_extreme_bits_survive(store: HiddenStateStore, make_sample: MakeSample) -> None:
    sample = make_sample(0, num_tokens=4)
    extremes = torch.tensor([0.0, -0.0, 1e-40, 3.3e38, -3.3e38, 1e-38, 1.0, -1.0]).to(torch.bfloat16)
    sample.last_hidden_state[:] = extremes
    store.put("key", sample)
    store.sync()
    assert torch.equal(store.get("key").last_hidden_state.view(torch.int16), sample.last_hidden_state.view(torch.int16))


def test_put_takes_a_copy(store: HiddenStateStore, make_sample: MakeSample) -> None:
    sample = make_sample(3)
    store.put("key", sample)
    sample.hidden_states.zero_()
    sample.token_ids.zero_()
    store.sync()
    assert_same(store.get("key"), make_sample(3))


def test_strided_states(store: HiddenStateStore, make_sample: MakeSample) -> None:
    sample = make_sample(7)
    strided = replace(sample, hidden_states=sample.hidden_states.transpose(0, 2).contiguous().transpose(0, 2))
    assert not strided.hidden_states.is_contiguous()
    store.put("key", strided)
    store.sync()
    assert_same(store.get("key"), sample)


def test_equal_key_is_skipped(store: HiddenStateStore, make_sample: MakeSample) -> None:
    store.put("key", make_sample(1))
    store.put("key", make_sample(2))
    store.sync()
    store.put("key", make_sample(3))
    assert_same(store.get("key"), make_sample(1))
    assert len(store.keys()) == 1


@pytest.mark.parametrize("published", [False, True])
def test_deleted_sample_is_missing_and_can_be_put_again(
    store: HiddenStateStore, make_sample: MakeSample, published: bool
) -> None:
    for seed in range(3):
        store.put(f"key{seed}", make_sample(seed))
    if published:
        store.sync()
    store.delete("key1")
    assert list(store.keys()) == list(store.lengths()) == ["key0", "key2"]
    with pytest.raises(MissingSampleError):
        store.get("key1")
    assert_same(store.get("key2"), make_sample(2))
    store.put("key1", make_sample(11))
    store.sync()
    assert_same(store.get("key1"), make_sample(11))


def test_missing_key_is_named(store: HiddenStateStore) -> None:
    for action in (store.get, store.delete):
        with pytest.raises(KeyError, match=r"sample 'nowhere' is not in .*Capture it first") as error:
            action("nowhere")
        assert "\\" not in str(error.value)  # the message, not its repr


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tensor", ["hidden_states", "last_hidden_state"])
def test_not_finite_is_refused(store: HiddenStateStore, make_sample: MakeSample, tensor: str, value: float) -> None:
    sample = make_sample(12)
    getattr(sample, tensor).view(-1)[-3] = value
    with pytest.raises(NonFiniteSampleError, match=f"sample 'bad': {tensor} contains NaN or infinity"):
        store.put("bad", sample)
    assert list(store.keys()) == []


def test_overflow_of_the_cast_is_refused(store: HiddenStateStore, make_sample: MakeSample) -> None:
    sample = make_sample(4, dtype=torch.float32)
    sample.hidden_states[0, 0, 0] = 3.4e38  # finite in float32, infinite in bfloat16
    with pytest.raises(NonFiniteSampleError):
        store.put("bad", sample)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.zeros(0, dtype=torch.int64)}, "no tokens"),
        ({"loss_mask": torch.zeros(3, dtype=torch.bool)}, r"loss_mask is \[3\] instead of \[9\]"),
        ({"hidden_states": torch.zeros(9, 2, 8)}, r"hidden_states is \[9, 2, 8\] instead of \[9, 3, 8\]"),
        ({"last_hidden_state": torch.zeros(9, 4)}, r"last_hidden_state is \[9, 4\] instead of \[9, 8\]"),
        ({"token_ids": torch.zeros(1, 9, dtype=torch.int64)}, r"token_ids is \[1, 9\] instead of \[9\]"),
    ],
)
def test_misfit_is_refused(store: HiddenStateStore, make_sample: MakeSample, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"sample 'bad'.*{message}"):
        store.put("bad", replace(make_sample(8), **change))
    assert list(store.keys()) == []


def test_empty_key_is_refused(store: HiddenStateStore, make_sample: MakeSample) -> None:
    with pytest.raises(ValueError, match="key=''"):
        store.put("", make_sample(1))


def test_room(store: HiddenStateStore) -> None:
    store.ensure_room(store.estimate_bytes(1000, num_samples=10))
    with pytest.raises(NoRoomError, match=r"bytes needed, .* free"):
        store.ensure_room(1 << 60)


def test_estimate_covers_the_samples(store: HiddenStateStore, make_sample: MakeSample) -> None:
    sample = make_sample(0, num_tokens=5000)
    assert sample.num_bytes - 4 * 5000 <= store.estimate_bytes(5000) <= 1.1 * sample.num_bytes


def test_close_can_be_repeated_and_undone(store: HiddenStateStore, make_sample: MakeSample) -> None:
    store.put("key", make_sample(1))
    store.close()
    store.close()
    assert_same(store.get("key"), make_sample(1))
    store.put("key2", make_sample(2))
    store.close()
    assert list(store.keys()) == ["key", "key2"]


def test_what_was_put_before_an_error_is_kept(
    make_store: MakeStore, manifest: Manifest, make_sample: MakeSample, tmp_path: Path
) -> None:
    store = make_store(tmp_path, manifest)
    with pytest.raises(RuntimeError, match="interrupted"), store:
        store.put("key", make_sample(1))
        raise RuntimeError("interrupted")
    assert_same(store.get("key"), make_sample(1))
