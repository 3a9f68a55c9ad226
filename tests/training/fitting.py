"""Short trainings of a tiny drafter, for callbacks to watch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tiny_world import tiny_batch
from torch.utils.data import DataLoader

from dspark_lab.drafter.base import Drafter
from dspark_lab.records import Batch

MONITOR = "val/acceptance_length_estimate"

RESUMING = pytest.mark.filterwarnings(
    "ignore:.*Checkpoint directory .* exists", "ignore:.*your dataloader is not resumable"
)
"""Of tests that resume: every batch is the same one, so its place does not matter."""


def fit(
    drafter: Drafter,
    folder: Path,
    callbacks: Sequence[Callback],
    *,
    steps: int,
    batches: Sequence[Batch] | None = None,
    resume: bool = False,
    **trainer: Any,
) -> L.Trainer:
    """``steps`` optimizer steps, a validation and ``last.ckpt`` every two, ``best.ckpt`` as real runs save it."""
    saving = [
        ModelCheckpoint(folder, "step", save_top_k=0, save_last=True, every_n_train_steps=2),
        ModelCheckpoint(folder, "best", monitor=MONITOR, mode="max", save_weights_only=True,
                        enable_version_counter=False),
    ]  # fmt: skip
    made = L.Trainer(
        **{
            "max_steps": steps,
            "accelerator": "cpu",
            "logger": False,
            "callbacks": [*callbacks, *saving],
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "check_val_every_n_epoch": None,
            "val_check_interval": 2,
            **trainer,
        }
    )
    path = folder / "last.ckpt" if resume else None
    train = list(batches or [tiny_batch() for _ in range(4)])
    made.fit(drafter, _loader(train), _loader([tiny_batch()]), ckpt_path=path, weights_only=True)
    return made


def _loader(batches: Sequence[Batch]) -> DataLoader:
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # pyright: ignore
