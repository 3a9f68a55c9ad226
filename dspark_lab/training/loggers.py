"""Weights & Biases, switched on by ``logger=wandb``."""

import os
import sys
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from dspark_lab.validation import checked


@checked
def csv_logger(*, run_dir: Path, run_name: str) -> Logger:
    """``csv/version_<n>/metrics.csv`` beside the run's own ``metrics.jsonl``; a resumed part is a version of its own."""
    return CSVLogger(save_dir=run_dir, name="csv")


@checked
def wandb_logger(*, run_dir: Path, run_name: str, project: str, entity: str | None, group: str | None) -> Logger:
    """One W&B run of the same name, offline where no key is set (``wandb sync`` sends it later).

    Raises:
        ValueError: the extra is not installed.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # even an offline run would look up a server
    offline = not os.environ.get("WANDB_API_KEY") and os.environ.get("WANDB_MODE") != "online"
    try:
        return WandbLogger(
            name=run_name, id=run_name, project=project, entity=entity, group=group, save_dir=run_dir, offline=offline
        )
    except ModuleNotFoundError as error:
        raise ValueError('logger=wandb needs W&B: pip install "dspark_lab[wandb]"') from error


def finish_wandb(*, failed: bool) -> None:
    """End the W&B run, if there is one: else the next job of a sweep in this process would go on in it."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish(exit_code=int(failed))
