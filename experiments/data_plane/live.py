"""How fast a real vLLM's states get into batches: captured, through Mooncake, checked, collated, as in live training.

    python experiments/data_plane/live.py --model <folder of a target> --readers 1 2 4

One engine and one segment, TCP over loopback. Each reader is a process with what a training rank has (``LiveBatches``); it
takes every batch at once and computes nothing, so that the engine and the way from it are all that is measured. Latency is
from a sample's request to the batch that it is in.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from dspark_lab.capture.client import CaptureClient
from dspark_lab.capture.endpoints import EndpointPool
from dspark_lab.capture.payloads import MooncakePayloads
from dspark_lab.capture.protocol import Described, payload_bytes
from dspark_lab.cluster.services import MooncakeMaster, MooncakeSegment
from dspark_lab.cluster.vllm import VllmServer, capture_arguments, through_mooncake
from dspark_lab.data.live import LiveCounts, LiveData, LiveRecipe
from dspark_lab.data.live_batches import LiveBatches
from dspark_lab.data.loader import RowSampler
from dspark_lab.data.window import Window
from dspark_lab.records import TokenizedConversation
from dspark_lab.store.mooncake_client import MooncakeClient
from dspark_lab.store.mooncake_connection import MooncakeConnection
from dspark_lab.store.protocol import Manifest

SEGMENT_BYTES = 2**30
ROW_TOKENS, ROWS_PER_BATCH = 1024, 1


@dataclass(frozen=True)
class Plan:
    """What a reader is to do: ``number`` of ``num_readers``."""

    connection: MooncakeConnection
    url: str
    manifest: Manifest
    conversations: Sequence[TokenizedConversation]
    concurrency: int  # of all readers together
    num_readers: int
    number: int


@dataclass
class Found:
    num_samples: int = 0
    num_bytes: int = 0
    latencies_s: list[float] = field(default_factory=list)


class TimedClient(CaptureClient):
    """Remembers when it asked."""

    asked: dict[str, float]

    def submit(self, conversation: TokenizedConversation) -> Described:
        self.asked[conversation.key] = time.perf_counter()
        return super().submit(conversation)


def read(plan: Plan, ready: Any, go: Any, results: Any) -> None:
    """One reader, in a process of its own."""
    torch.set_num_threads(1)
    by_key = {conversation.key: conversation for conversation in plan.conversations}
    rows = RowSampler(
        [(key, len(one)) for key, one in by_key.items()], row_tokens=ROW_TOKENS, rows_per_batch=ROWS_PER_BATCH, seed=0,
        rank=plan.number, world_size=plan.num_readers,
    )  # fmt: skip
    recipe = LiveRecipe(
        window_samples=4096, window_bytes=SEGMENT_BYTES // 2, num_retries=0, engine_deadline_s=60, max_lost_share=0,
        max_lost_in_a_row=0,
    )  # fmt: skip
    window = Window(4096, SEGMENT_BYTES // 2)
    assert plan.connection.admin_url
    payloads = MooncakePayloads(MooncakeClient(**plan.connection.of_client), admin_url=plan.connection.admin_url)
    with closing(payloads), EndpointPool([plan.url], patience_s=30) as pool:
        pool.wait(patience_s=30)
        client = TimedClient(
            payloads, namespace=f"bench{plan.number}", generation=None, endpoints=pool, manifest=plan.manifest,
            concurrency=plan.concurrency // plan.num_readers, timeout_s=120, payload_timeout_s=60,
        )  # fmt: skip
        client.asked = {}
        ready.release()
        go.wait()
        live = LiveBatches(
            LiveData(client, by_key, recipe, window), plan=islice(rows.onward(0, 0), len(rows)), window=window,
            row_tokens=ROW_TOKENS, pinned=False, counts=LiveCounts(),
        )  # fmt: skip
        found = Found()
        for _ in range(len(rows)):
            if not live.step(1, interrupted=lambda: False):
                raise RuntimeError(live.failure)
            batch, now = live.take(), time.perf_counter()
            found.latencies_s += [now - client.asked[key] for key in batch.keys]
            found.num_samples += len(batch.keys)
            found.num_bytes += sum(payload_bytes(len(by_key[key]), plan.manifest) for key in batch.keys)
        results.put(found)
        live.close()


def measure(plans: Sequence[Plan]) -> tuple[float, list[Found]]:
    """Seconds until the last batch of all readers, and what each found."""
    context = get_context("spawn")
    ready, go, results = context.Semaphore(0), context.Event(), context.Queue()
    readers = [context.Process(target=read, args=(plan, ready, go, results)) for plan in plans]
    for reader in readers:
        reader.start()
    for _ in readers:
        ready.acquire()
    start = time.perf_counter()
    go.set()
    found = [results.get(timeout=600) for _ in readers]
    seconds = time.perf_counter() - start
    for reader in readers:
        reader.join()
    return seconds, found


def conversations_of(number: int, *, num_tokens: int, seed: int) -> list[TokenizedConversation]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(100, 1000, (number, num_tokens), generator=generator)
    return [
        TokenizedConversation(f"{seed}-{i}", row, torch.ones(num_tokens, dtype=torch.bool)) for i, row in enumerate(ids)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(str(files("dspark_lab") / "assets" / "tiny")))
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=300, help="of a sample")
    parser.add_argument("--concurrency", type=int, default=32, help="requests under way, of all readers")
    parser.add_argument("--readers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    config = json.loads((given.model / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    manifest = Manifest(
        "bench", revision="0", fingerprint="f", template_hash="t", layer_ids=(1, num_layers // 2, num_layers - 1),
        hidden_size=config["hidden_size"], engine="vllm",
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        MooncakeMaster(folder=Path(folder)) as master,
        MooncakeSegment(master, folder=Path(folder), num_bytes=SEGMENT_BYTES),
    ):
        connection = MooncakeConnection(
            master_address=master.address, admin_url=master.admin_url, protocol="tcp", rdma_devices="",
            local_hostname="127.0.0.1",
        )  # fmt: skip
        capturing = capture_arguments(
            (*manifest.layer_ids, num_layers), transfer=through_mooncake(connection.of_connector)
        )
        arguments = [*capturing, "--dtype", "bfloat16", "--max-model-len", str(given.tokens + 1)]
        with VllmServer(folder=Path(folder), model=str(given.model), arguments=arguments, on_cpu=True) as server:
            print(
                "| readers | samples/s | tokens/s | MB/s | latency s, median | 90 % |\n|--:|--:|--:|--:|--:|--:|",
                flush=True,
            )
            for number in given.readers:
                rounds = []
                for turn in range(given.rounds + 1):  # the first one warms up
                    asked = conversations_of(given.samples, num_tokens=given.tokens, seed=100 * number + turn)
                    plans = [
                        Plan(connection, server.url, manifest, asked, given.concurrency, number, reader)
                        for reader in range(number)
                    ]
                    rounds.append(measure(plans))
                tell(number, rounds[1:], num_tokens=given.tokens)


def tell(number: int, rounds: Sequence[tuple[float, list[Found]]], *, num_tokens: int) -> None:
    rates = [sum(found.num_samples for found in all_found) / seconds for seconds, all_found in rounds]
    megabytes = [sum(found.num_bytes for found in all_found) / 1e6 / seconds for seconds, all_found in rounds]
    latencies = [latency for _, all_found in rounds for found in all_found for latency in found.latencies_s]
    middle, high = statistics.median(latencies), statistics.quantiles(latencies, n=10)[-1]

    def spread(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"

    print(
        f"| {number} | {spread(rates)} | {statistics.median(rates) * num_tokens:.0f} | {spread(megabytes)} | {middle:.2f} | "
        f"{high:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
