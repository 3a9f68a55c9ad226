"""A training of a few steps on random documents, small enough to be run, killed and run again many times."""

import os
import random
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context, set_start_method
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import Callback
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).parent.parent / "drafter"))

from tiny_world import SPEC, build, context_of, document, propose

from dspark_lab.data.datamodule import HiddenStateDataModule
from dspark_lab.data.packing import SampleOutline
from dspark_lab.drafter.base import Drafter
from dspark_lab.progress import console
from dspark_lab.records import Sampling, TargetSample
from dspark_lab.report.lightning_logger import JsonLinesLogger
from dspark_lab.store.memory import MemoryStore
from dspark_lab.store.protocol import Manifest
from dspark_lab.training.checkpoints import first_whole
from dspark_lab.training.trainer import build_trainer

ROW_TOKENS = 24
FORKS = get_context("forkserver")
# Torch, Lightning and all else are imported once for all processes.
FORKS.set_forkserver_preload(["dspark_lab.training.trainer", "dspark_lab.drafter.dspark", "dspark_lab.data.datamodule"])


def documents(count: int, *, seed: int) -> dict[str, TargetSample]:
    """Of uneven length, some with an answer too short for an anchor."""
    generator = random.Random(seed)
    made = {}
    for index in range(count):
        prompt, answer = generator.randrange(1, 8), generator.choice((1, 1, 2, 5, 9, 14))
        made[f"{seed}-{index}"] = document("0" * prompt + "1" * answer, seed=100 * seed + index)
    return made


def outline(key: str, sample: TargetSample) -> SampleOutline:
    return SampleOutline(key, sample.token_ids.numel(), int(sample.loss_mask.nonzero()[0]))


def datamodule(*, rows_per_batch: int, num_workers: int = 0) -> HiddenStateDataModule:
    manifest = Manifest(
        "toy",
        revision="0",
        fingerprint="f",
        template_hash="t",
        layer_ids=SPEC.layer_ids,
        hidden_size=SPEC.hidden_size,
        engine="test",
        dtype="float32",
    )
    store, train, validation = MemoryStore(manifest=manifest), documents(27, seed=1), documents(6, seed=2)
    for key, sample in (train | validation).items():
        store.put(key, sample)
    return HiddenStateDataModule(
        store=store,
        train=[outline(*entry) for entry in train.items()],
        validation=[outline(*entry) for entry in validation.items()],
        row_tokens=ROW_TOKENS,
        rows_per_batch=rows_per_batch,
        num_workers=num_workers,
        prefetch_factor=2,
        seed=4,
    )


def fit(
    run_dir: Path,
    *,
    drafter: Drafter | None = None,
    data: HiddenStateDataModule | None = None,
    name: str = "dspark",
    rows_per_batch: int = 2,
    num_workers: int = 0,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Drafter:
    """Train from the newest whole checkpoint in ``run_dir`` to ``max_steps``; losses go to its ``metrics.jsonl``."""
    L.seed_everything(1, verbose=False)
    drafter = drafter or build(name)
    defaults: dict[str, Any] = {
        "max_steps": 12,
        "val_every_steps": 5,
        "checkpoint_every_steps": 1,
        "precision": "32-true",
        "accelerator": "cpu",
        "strategy": "auto",
        "devices": 1,
        "num_nodes": 1,
        "gradient_clip": 1.0,
        "accumulate": 1,
        "log_every_steps": 1,
        "seed": 3,
    }
    trainer = build_trainer(
        run_dir=run_dir,
        loggers=[JsonLinesLogger(directory=run_dir)],
        callbacks=list(callbacks),
        monitor="val/acceptance_length_estimate",
        **defaults | settings,
    )
    last, _ = first_whole(run_dir / "checkpoints")
    data = data or datamodule(rows_per_batch=rows_per_batch, num_workers=num_workers)
    trainer.fit(drafter, datamodule=data, ckpt_path=last, weights_only=True)
    return drafter


class Noisy(Callback):
    """Adds to the loss's gradient what each global generator draws, and draws more of it in validation."""

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad += 1e-2 * (random.random() + np.random.rand() + torch.rand(()))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        random.random(), np.random.rand(), torch.rand(3)


class Traffic(TorchDispatchMode):
    """Counts the elements that collectives send, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.sent.append((func.overloadpacket.__name__, sum(tensor.numel() for tensor in tensors)))
        return func(*args, **(kwargs or {}))


class Watch(Callback):
    """Notes each step's rows and collectives, and proposes after the first."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.steps: list[list[tuple[str, int]]] = []
        self.proposed: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(batch.row_ids)
        self._traffic = Traffic()
        self._traffic.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._traffic.__exit__(None, None, None)
        self.steps.append(self._traffic.sent)
        if not self.proposed:
            context = context_of(document("0000011111111", seed=9), anchor=6)
            proposal = propose(pl_module, context, num_draft_tokens=3, sampling=Sampling())
            self.proposed = proposal.token_ids.tolist()


def in_process(function: Callable[..., None], *args: Any, **settings: Any) -> BaseProcess:
    """``function`` in a new process with one thread, whatever the machine."""
    process = FORKS.Process(target=_alone, args=(function, args, settings))
    process.start()
    return process


def _alone(function: Callable[..., None], args: Any, settings: Any) -> None:
    set_start_method("fork", force=True)  # of data workers
    torch.set_num_threads(1)
    console.quiet = True
    function(*args, **settings)


def train(run_dir: Path, *, noisy: bool = False, **settings: Any) -> None:
    fit(run_dir, callbacks=[Noisy()] if noisy else [], **settings)


def train_as_rank(run_dir: Path, *, rank: int, num_ranks: int, port: int, watch: bool, **settings: Any) -> None:
    """One rank; leaves its watch's notes in ``run_dir``/notes_<rank>.pt."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    rank_zero_only.rank = rank
    notes = Watch()
    fit(run_dir, devices=num_ranks, callbacks=[notes] if watch else [], **settings)
    torch.save({"rows": notes.rows, "steps": notes.steps, "proposed": notes.proposed}, run_dir / f"notes_{rank}.pt")
