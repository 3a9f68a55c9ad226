"""Samples that depend on their key only, so that any process can check what it reads; and processes that do so."""

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.utils.data import Dataset

from dspark_lab.records import TargetSample
from dspark_lab.store import index, writer
from dspark_lab.store.disk import DiskStore
from dspark_lab.store.protocol import HiddenStateStore, Manifest

MANIFEST = Manifest(
    "tiny",
    revision="r1",
    fingerprint="f1",
    template_hash="t1",
    layer_ids=(1, 2, 3),
    hidden_size=8,
    engine="huggingface",
)


def open_store(root: Path, **settings) -> DiskStore:
    return DiskStore(root, **{"manifest": MANIFEST, "reserve_bytes": 0} | settings)


def sample_of(seed: int, *, num_tokens: int | None = None, dtype: torch.dtype = torch.bfloat16) -> TargetSample:
    generator = torch.Generator().manual_seed(seed)
    tokens = 1 + seed % 13 if num_tokens is None else num_tokens
    return TargetSample(
        token_ids=torch.randint(0, 1 << 20, (tokens,), generator=generator),
        loss_mask=torch.rand(tokens, generator=generator) < 0.5,
        hidden_states=torch.randn(tokens, 3, 8, generator=generator).to(dtype),
        last_hidden_state=torch.randn(tokens, 8, generator=generator).to(dtype),
    )


def key_of(seed: int) -> str:
    return f"key{seed:04d}"


def is_intact(store: HiddenStateStore, key: str) -> bool:
    got, put = store.get(key), sample_of(int(key.removeprefix("key")))
    names = ("token_ids", "loss_mask", "hidden_states", "last_hidden_state")
    return all(torch.equal(getattr(got, name), getattr(put, name)) for name in names)


class StoredKeys(Dataset):
    """What a DataLoader's worker does with a store."""

    def __init__(self, store: DiskStore, keys: list[str]) -> None:
        self.store = store
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[bool, int]:
        return is_intact(self.store, self.keys[index]), os.getpid()


def write_and_tell(root: Path, seeds: range, told: Connection) -> None:
    """Tell each key after its publication, so that the parent knows what must survive."""
    store = DiskStore(root, manifest=MANIFEST, reserve_bytes=0)
    told.send("ready")
    for seed in seeds:
        store.put(key_of(seed), sample_of(seed))
        store.sync()
        told.send(key_of(seed))
    store.close()


def die_at(moment: str, root: Path) -> None:
    """Publish key0000 and key0001, then be killed in the middle of publishing key0002."""
    store = DiskStore(root, manifest=MANIFEST, reserve_bytes=0)
    for seed in range(2):
        store.put(key_of(seed), sample_of(seed))
        store.sync()
    store.put(key_of(2), sample_of(2))
    real_write, real_publish = os.write, writer.publish

    def tear(descriptor: int, line: bytes) -> int:
        real_write(descriptor, line[: len(line) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def publish_and_die(staged: Path, final: Path) -> None:
        if moment == "renamed":
            real_publish(staged, final)
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "line torn":
        index.os.write = tear
    else:
        writer.publish = publish_and_die
    store.sync()
    raise AssertionError("not reached")


def read_until_complete(root: Path, num_keys: int, told: Connection) -> None:
    """Check all samples of a growing store again and again; tell (looks, damaged keys) once ``num_keys`` are there."""
    store = DiskStore(root, manifest=MANIFEST, mode="read")
    told.send("ready")
    looks, damaged, keys = 0, set(), []
    while len(keys) < num_keys:
        keys = store.keys()
        damaged |= {key for key in keys if not is_intact(store, key)}
        looks += 1
    told.send((looks, damaged))
