"""How fast the disk store takes and gives samples, beside the plain file writes and reads that it cannot beat.

python experiments/data_plane/disk.py --root /a/folder/on/the/disk --rounds 5
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from dspark_lab.records import TargetSample
from dspark_lab.store.disk import DiskStore
from dspark_lab.store.protocol import Manifest

SHAPES = {"SmolLM2-135M": (576, 300), "8B": (4096, 1024)}  # hidden size, tokens of a sample


def samples_of(manifest: Manifest, *, num_tokens: int, num_bytes: int) -> list[TargetSample]:
    generator = torch.Generator().manual_seed(0)
    count = max(num_bytes // (num_tokens * manifest.bytes_per_token), 1)
    shape = (num_tokens, len(manifest.layer_ids) + 1, manifest.hidden_size)
    states = torch.randn(shape, generator=generator).to(manifest.torch_dtype)
    ids = torch.arange(num_tokens)
    return [TargetSample(ids + i, ids % 2 == 0, states[:, :-1], states[:, -1]) for i in range(count)]


def rounds_of(manifest: Manifest, samples: list[TargetSample], *, root: Path) -> Iterator[tuple[str, float]]:
    """(what, seconds) of one round in an empty folder."""
    num_bytes = sum(sample.num_bytes for sample in samples)
    yield "plain write + fsync", timed(lambda: write_plainly(root / "plain", num_bytes))
    yield "plain read, cached", timed(lambda: read_plainly(root / "plain"))
    forget([root / "plain"])
    yield "plain read, cold", timed(lambda: read_plainly(root / "plain"))
    store = DiskStore(root / "store", manifest=manifest)
    yield "put + sync", timed(lambda: put_all(store, samples))
    yield "get, cached", timed(lambda: get_all(store, len(samples)))
    store.close()
    forget((root / "store" / "shards").iterdir())
    yield "get, cold", timed(lambda: get_all(store, len(samples)))
    store.close()
    yield "open + lengths", timed(lambda: DiskStore(root / "store", manifest=manifest, mode="read").lengths())


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def put_all(store: DiskStore, samples: list[TargetSample]) -> None:
    for number, sample in enumerate(samples):
        store.put(f"{number:032d}", sample)
    store.sync()


def get_all(store: DiskStore, num_samples: int) -> None:
    for number in range(num_samples):
        store.get(f"{number:032d}")


def write_plainly(path: Path, num_bytes: int) -> None:
    block = os.urandom(2**20)
    with path.open("wb") as file:
        for _ in range(num_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def read_plainly(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        block = bytearray(2**20)
        while file.readinto(block):
            pass


def forget(paths) -> None:
    """Drop the files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="an existing folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=256, help="of each round")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name, (hidden_size, num_tokens) in SHAPES.items():
        manifest = Manifest(
            name,
            revision="",
            fingerprint="",
            template_hash="",
            layer_ids=(2, 15, 27),
            hidden_size=hidden_size,
            engine="none",
        )
        samples = samples_of(manifest, num_tokens=num_tokens, num_bytes=arguments.megabytes * 2**20)
        times: dict[str, list[float]] = {}
        for number in range(arguments.rounds):
            place = arguments.root / f"disk_study_{os.getpid()}_{number}"
            place.mkdir()
            try:
                for what, seconds in rounds_of(manifest, samples, root=place):
                    times.setdefault(what, []).append(seconds)
            finally:
                shutil.rmtree(place)
        megabytes = sum(sample.num_bytes for sample in samples) / 1e6
        print(f"\n{name}: {len(samples)} samples x {num_tokens} tokens, {megabytes:.0f} MB, {arguments.rounds} rounds")
        print("| | median MB/s | lowest | highest | median s |\n|---|---|---|---|---|")
        for what, seconds in times.items():
            median = statistics.median(seconds)
            speeds = [megabytes / value for value in (median, max(seconds), min(seconds))]
            columns = ["", "", ""] if what == "open + lengths" else [f"{speed:.0f}" for speed in speeds]
            print("| " + " | ".join([what, *columns, f"{median:.4f}"]) + " |")


if __name__ == "__main__":
    main()
