"""Trainings of a tiny drafter on ``produced`` states, from a store or live from a producer, each in a process of its own."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from produced import MANIFEST, conversations, sample_of
from tiny_training import fit

from dspark_lab.capture.client import CaptureClient
from dspark_lab.capture.endpoints import EndpointPool
from dspark_lab.capture.payloads import MooncakePayloads
from dspark_lab.data.datamodule import HiddenStateDataModule
from dspark_lab.data.live import LiveData, LiveRecipe
from dspark_lab.data.packing import SampleOutline
from dspark_lab.data.window import Window
from dspark_lab.store.memory import MemoryStore
from dspark_lab.store.mooncake_client import MooncakeClient
from dspark_lab.training.live import LiveWatch

TRAIN, VALIDATION = conversations(27, seed=1), conversations(6, seed=2)
ROW_TOKENS = 24
RECIPE = {
    "window_samples": 24,
    "window_bytes": 2**20,
    "num_retries": 3,
    "engine_deadline_s": 60.0,
    "max_lost_share": 0.05,
    "max_lost_in_a_row": 4,
}


def datamodule(live: LiveData | None, *, rows_per_batch: int) -> HiddenStateDataModule:
    store = MemoryStore(manifest=MANIFEST)
    for conversation in (*TRAIN, *VALIDATION):
        store.put(conversation.key, sample_of(conversation))
    return HiddenStateDataModule(
        store=store,
        train=[SampleOutline.of(conversation) for conversation in TRAIN],
        validation=[SampleOutline.of(conversation) for conversation in VALIDATION],
        row_tokens=ROW_TOKENS,
        rows_per_batch=rows_per_batch,
        num_workers=0,
        seed=4,
        live=live,
    )


def train_stored(run_dir: Path, *, rows_per_batch: int = 2, **settings: Any) -> None:
    fit(run_dir, data=datamodule(None, rows_per_batch=rows_per_batch), **settings)


def train_live(
    run_dir: Path,
    services: Mapping[str, str],
    *,
    rows_per_batch: int = 2,
    recipe: Mapping[str, Any] | None = None,
    generation: str | None = None,
    **settings: Any,
) -> None:
    """``services``: master_address, admin_url and url. Errors go to ``run_dir``/error.txt, counts to counts.pt."""
    chosen = LiveRecipe(**{**RECIPE, **(recipe or {})})
    pool = EndpointPool([services["url"]], patience_s=0.3, probe_every_s=0.1)
    mooncake = MooncakeClient(
        master_address=services["master_address"], protocol="tcp", rdma_devices="", local_hostname="127.0.0.1"
    )
    client = CaptureClient(
        MooncakePayloads(mooncake, admin_url=services["admin_url"]),
        namespace="live",
        generation=generation,
        endpoints=pool,
        manifest=MANIFEST,
        concurrency=3,
        timeout_s=2.0,
        payload_timeout_s=2.0,
    )
    orphans = client.remove_orphans() if generation is None else 0
    by_key = {conversation.key: conversation for conversation in TRAIN}
    window = Window(chosen.window_samples, chosen.window_bytes or 0)
    data = datamodule(LiveData(client, by_key, chosen, window), rows_per_batch=rows_per_batch)
    watch = LiveWatch(run_dir / "checkpoints" / "last.ckpt")
    try:
        fit(run_dir, data=data, callbacks=[watch], **settings)
    except Exception as error:
        run_dir.joinpath(f"error{rank_zero_only.rank}.txt").write_text(f"{type(error).__name__}: {error}")
        sys.exit(1)
    finally:
        data.close()
        pool.close()
        torch.save({"orphans": orphans, **watch.totals}, run_dir / f"counts{rank_zero_only.rank}.pt")


def train_live_as_rank(run_dir: Path, services: Mapping[str, str], *, rank: int, port: int, **settings: Any) -> None:
    """One of two."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    rank_zero_only.rank = rank
    train_live(run_dir, services, generation="shared", devices=2, strategy="ddp", rows_per_batch=1, **settings)
