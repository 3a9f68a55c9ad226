"""Checkpoint files: whole or absent after a kill, checked before use, the one before the newest kept.

A file is written aside, synced and renamed. The zip container that torch writes holds a checksum of every tensor, so
damage of a disk or a copy shows without a second file.
"""

import errno
import os
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from dspark_lab.progress import console
from dspark_lab.records import Batch
from dspark_lab.signals import Requeue, handled
from dspark_lab.store.durable import publish
from dspark_lab.training.collectives import any_rank

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
NEWEST_FIRST = (LAST, PREVIOUS)

DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, pickle.UnpicklingError),
    *(EOFError, NotImplementedError, RuntimeError, ValueError, OSError),
)
"""What reading a damaged file raises."""


class CheckpointFiles(TorchCheckpointIO):
    """How Lightning writes checkpoints here. A new ``last.ckpt`` leaves the one before as ``previous.ckpt``."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Raises ValueError, naming path and bytes, when the disk is full; earlier checkpoints stay as they are."""
        final = Path(path)
        staged = final.with_name(f".{final.name}.partial")  # of a killed writer: written over
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            with staged.open("wb") as file:
                torch.save(checkpoint, file)
            if final.name == LAST and final.exists():
                _replace_last(staged, final)
            else:
                publish(staged, final)
        except (OSError, RuntimeError) as error:  # torch turns a write error into a RuntimeError
            staged.unlink(missing_ok=True)
            if not _disk_is_full(error):
                raise
            raise ValueError(
                f"{final}: the disk is full: a checkpoint takes {tensor_bytes(checkpoint):,} bytes and a little more, "
                f"{shutil.disk_usage(final.parent).free:,} are free there. The checkpoint before is intact: free some "
                "space and give the same command to go on from it"
            ) from error


def model_checkpoints(folder: Path, monitor: str, *, every_steps: int) -> Sequence[ModelCheckpoint]:
    """``last.ckpt`` every few steps, to resume from; ``best.ckpt`` by the acceptance in ``monitor``, to evaluate."""
    return [
        ModelCheckpoint(
            dirpath=folder,
            filename="step",
            save_top_k=0,
            save_last=True,
            every_n_train_steps=every_steps,
            enable_version_counter=False,
        ),
        ModelCheckpoint(
            dirpath=folder,
            filename="best",
            monitor=monitor,
            mode="max",
            save_top_k=1,
            save_weights_only=True,
            enable_version_counter=False,
        ),
    ]


class SaveOnSignal(Callback):
    """Writes ``path`` at the end of the optimizer step in which any rank got a signal, and leaves with ``REQUEUE``.

    It leaves when the step is logged too, and validated where that is due: at the start of the next one.

    Lightning's own handlers are replaced: for SIGTERM it leaves without a checkpoint, after a broadcast from inside the
    handler, which hangs when only some ranks got the signal; for Slurm it writes a checkpoint of another name and calls
    ``scontrol`` itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.received = self.saved = False
        self._step = 0
        self._handlers = ExitStack()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.received, self.saved, self._step = False, False, trainer.global_step
        self._handlers.enter_context(handled(self._remember))  # not in setup(): Lightning's own come after that

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # within an accumulation window: its gradients are in no checkpoint
        self._step = trainer.global_step
        self.saved = any_rank(self.received, device=trainer.strategy.root_device)
        if self.saved:
            trainer.save_checkpoint(self.path, weights_only=False)
            console.print(f"train: signal received: step {self._step} is saved, the same command goes on from it")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        if self.saved:
            raise Requeue

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._handlers.close()
        if self.saved:
            raise Requeue

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._handlers.close()


def signalled(trainer: L.Trainer) -> bool:
    """Whether this process got a signal that ``SaveOnSignal`` has not heeded yet."""
    return any(callback.received for callback in trainer.callbacks if isinstance(callback, SaveOnSignal))  # pyright: ignore


def first_whole(folder: Path, names: Sequence[str] = NEWEST_FIRST) -> tuple[Path | None, list[Path]]:
    """The first of ``names`` in ``folder`` that is there and whole, and the damaged ones that were passed over."""
    damaged = []
    for path in (folder / name for name in dict.fromkeys(names)):
        if path.exists():
            if is_whole(path):
                return path, damaged
            damaged.append(path)
    return None, damaged


def is_whole(path: Path) -> bool:
    """Whether torch can open a checkpoint, and every checksum in it is right. Reads the file once."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except DAMAGE:
        return False


def checkpoint_step(path: Path) -> int:
    """Optimizer steps that went into a checkpoint."""
    return int(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"])


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in nested mappings and sequences."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(tensor_bytes, value.values()))
    return sum(map(tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def _replace_last(staged: Path, final: Path) -> None:
    """At every moment there is a whole ``last`` or ``previous``, also where the old ``last`` turns out to be torn."""
    second_name = final.with_name(f".{PREVIOUS}.partial")
    second_name.unlink(missing_ok=True)
    try:
        os.link(final, second_name)
    except OSError:  # a file system without hard links: for a moment only the previous one has a name
        final.replace(second_name)
    publish(staged, final)
    second_name.replace(final.with_name(PREVIOUS))


def _disk_is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False
