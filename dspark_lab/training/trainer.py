"""Lightning's Trainer with the few choices that this project makes for everybody."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger

from dspark_lab.target.precision import has_bfloat16, resolve_device
from dspark_lab.validation import checked

Precision = Literal["auto", "bf16-mixed", "32-true"]

CHECKPOINT_FOLDER = "checkpoints"


@checked
def build_trainer(
    *,
    run_dir: Path,
    loggers: list[Logger],
    callbacks: list[Callback],
    monitor: str,
    max_steps: int,
    val_every_steps: int,
    checkpoint_every_steps: int,
    precision: Precision,
    accelerator: str,
    devices: int,
    gradient_clip: float,
    accumulate: int,
    log_every_steps: int,
) -> L.Trainer:
    """A Trainer that counts in optimizer steps, validates every ``val_every_steps`` of them and draws its own batches.

    Weights are fp32; ``precision`` auto computes in bf16 where the hardware multiplies it.
    """
    if max_steps < 1 or val_every_steps < 1 or checkpoint_every_steps < 1 or accumulate < 1:
        raise ValueError(
            f"max_steps={max_steps}, val_every_steps={val_every_steps}, accumulate={accumulate} and "
            f"checkpoint_every_steps={checkpoint_every_steps} must all be at least 1"
        )
    return L.Trainer(
        default_root_dir=run_dir,
        logger=loggers,
        callbacks=[*callbacks, *checkpoints(run_dir, monitor, every_steps=checkpoint_every_steps)],
        max_steps=max_steps,
        max_epochs=-1,
        check_val_every_n_epoch=None,
        val_check_interval=min(val_every_steps, max_steps) * accumulate,
        num_sanity_val_steps=0,
        precision=resolve_precision(precision),
        accelerator=accelerator,
        devices=devices,
        gradient_clip_val=gradient_clip or None,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=log_every_steps,
        use_distributed_sampler=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )


def checkpoints(run_dir: Path, monitor: str, *, every_steps: int) -> Sequence[ModelCheckpoint]:
    """``last.ckpt`` every few steps, to resume from; ``best.ckpt`` by the acceptance in ``monitor``, to evaluate."""
    folder = run_dir / CHECKPOINT_FOLDER
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


def resolve_precision(precision: Precision) -> Literal["bf16-mixed", "32-true"]:
    if precision != "auto":
        return precision
    return "bf16-mixed" if has_bfloat16(resolve_device("auto")) else "32-true"
