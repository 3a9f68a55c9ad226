"""How fast samples go through a real Mooncake on this machine, beside Mooncake alone, a memory copy and hs-connectors.

    python experiments/data_plane/transfers.py --rounds 5

One segment in a process of its own, TCP over loopback. Every way moves the same states in the same round.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from hs_connectors.mooncake_store import (  # pyright: ignore[reportMissingImports]
    MooncakeHiddenStatesStore,
    MooncakeStoreConfig,
    packed_layout,
)

from dspark_lab.cluster.services import MooncakeMaster, MooncakeSegment
from dspark_lab.records import TargetSample
from dspark_lab.store.mooncake import MooncakeStore
from dspark_lab.store.mooncake_client import MooncakeClient
from dspark_lab.store.protocol import Manifest

SHAPES = {"64 MB": (4096, 3, 1953), "0.70 GB": (7168, 5, 8138)}  # hidden size, captured layers, tokens
SEGMENT_BYTES = 4 * 2**30


def sample_of(hidden: int, layers: int, tokens: int) -> TargetSample:
    states = torch.randn(tokens, layers + 1, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.arange(tokens)
    return TargetSample(ids, ids > 9, states[:, :-1], states[:, -1])


def manifest_of(hidden: int, layers: int) -> Manifest:
    return Manifest(
        "bench", revision="0", fingerprint="f", template_hash="t", layer_ids=tuple(range(layers)), hidden_size=hidden,
        engine="bench",
    )  # fmt: skip


def store_settings(master: MooncakeMaster, manifest: Manifest, **further: Any) -> dict[str, Any]:
    return {
        "manifest": manifest, "namespace": "bench", "generation": None, "part_bytes": 64 * 2**20,
        "master_address": master.address, "admin_url": master.admin_url, "protocol": "tcp", "rdma_devices": "",
        "local_hostname": "127.0.0.1", **further,
    }  # fmt: skip


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def rounds_of(master: MooncakeMaster, sample: TargetSample, manifest: Manifest) -> Iterator[tuple[str, float]]:
    """(way, seconds) again and again, all ways in turn."""
    num_bytes = sample.num_bytes
    client = MooncakeClient(master_address=master.address, protocol="tcp", rdma_devices="", local_hostname="127.0.0.1")
    source, sink = client.take(num_bytes), client.take(num_bytes)
    config = MooncakeStoreConfig(
        local_hostname="127.0.0.1", master_server_address=master.address, global_segment_size=0, local_buffer_size=2**30
    )
    stock = MooncakeHiddenStatesStore(config).setup()
    states = torch.cat([sample.hidden_states, sample.last_hidden_state[:, None]], dim=1)
    tensors = {"hidden_states": states, "token_ids": sample.token_ids}
    layout, aligned = packed_layout({name: (tuple(each.shape), each.dtype) for name, each in tensors.items()})
    with closing(client), MooncakeStore(**store_settings(master, manifest)) as store:
        number = 0
        while True:
            number += 1
            yield "memory copy", timed(lambda: sink.copy_(source))
            yield "Mooncake alone, put", timed(lambda: client.put(["raw"], [source]))
            yield "Mooncake alone, get", timed(lambda: client.get_into(["raw"], [sink]))
            client.remove(["raw"])
            key = f"{number:032d}"
            yield "store.put", timed(lambda key=key: store.put(key, sample))
            yield "store.get", timed(lambda key=key: store.get(key))
            store.delete(key)
            told = {"handle": f"stock-{len(states)}-{number}", "version": 1, "tensors": layout}
            told["metadata"] = {
                "num_tokens": len(states),
                "total_aligned_bytes": aligned,
                "extract_mode": "prompt_only",
            }
            yield "hs-connectors, put", timed(lambda told=told: stock.put_sample(told, tensors))
            yield "hs-connectors, get", timed(lambda told=told: stock.get_sample(told, timeout=60))
            stock.delete_sample(told["handle"])


def read(settings: dict[str, Any], key: str, times: int, ready: Any, go: Any, done: Any) -> None:
    with MooncakeStore(**settings) as store:
        store.get(key)
        ready.release()
        go.wait()
        for _ in range(times):
            store.get(key)
        done.release()  # closing a client takes a second, which is no reading


def read_together(master: MooncakeMaster, sample: TargetSample, manifest: Manifest, number: int, times: int) -> float:
    """Seconds in which ``number`` processes each read the sample ``times`` times."""
    context, key = get_context("spawn"), "0" * 32
    with MooncakeStore(**store_settings(master, manifest, namespace=f"readers-{number}")) as store:
        store.put(key, sample)
        settings = store_settings(master, manifest, namespace=f"readers-{number}", generation=store.generation)
        ready, go, done = context.Semaphore(0), context.Event(), context.Semaphore(0)
        readers = [context.Process(target=read, args=(settings, key, times, ready, go, done)) for _ in range(number)]
        for reader in readers:
            reader.start()
        for _ in readers:
            ready.acquire()
        start = time.perf_counter()
        go.set()
        for _ in readers:
            done.acquire()
        seconds = time.perf_counter() - start
        for reader in readers:
            reader.join()
        store.delete(key)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--readers", type=int, nargs="*", default=[1, 2, 4])
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        MooncakeMaster(folder=Path(folder)) as master,
        MooncakeSegment(master, folder=Path(folder), num_bytes=SEGMENT_BYTES),
    ):
        print("| sample | way | MB/s, median (lowest to highest) |\n|---|---|--:|")
        for name, (hidden, layers, tokens) in SHAPES.items():
            sample, manifest = sample_of(hidden, layers, tokens), manifest_of(hidden, layers)
            megabytes = sample.num_bytes / 1e6
            rates: dict[str, list[float]] = {}
            per_round = 7
            for index, (way, seconds) in enumerate(rounds_of(master, sample, manifest)):
                if index >= per_round:  # the first round warms up
                    rates.setdefault(way, []).append(megabytes / seconds)
                if index + 1 == per_round * (arguments.rounds + 1):
                    break
            for way, found in rates.items():
                middle, low, high = statistics.median(found), min(found), max(found)
                print(f"| {name} | {way} | {middle:.0f} ({low:.0f} to {high:.0f}) |", flush=True)
        name = "64 MB"
        hidden, layers, tokens = SHAPES[name]
        sample, manifest = sample_of(hidden, layers, tokens), manifest_of(hidden, layers)
        for number in arguments.readers:
            seconds = read_together(master, sample, manifest, number, times=10)
            rate = number * 10 * sample.num_bytes / 1e6 / seconds
            print(f"| {name} | store.get, {number} readers together | {rate:.0f} |", flush=True)


if __name__ == "__main__":
    main()
