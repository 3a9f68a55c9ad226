"""The optional loggers of training: a CSV, or Weights & Biases. What the report reads is always written beside them."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from pydantic import PositiveFloat

from dspark_lab.progress import console
from dspark_lab.validation import checked


@dataclass(frozen=True, slots=True)
class LoggedJob:
    """What a logger says of this job: ``job_type`` is the family of its stages, ``tags`` are the Hydra choices."""

    directory: Path
    name: str
    experiment: str
    job_type: str
    tags: tuple[str, ...]


@checked
def csv_logger(*, job: LoggedJob) -> Logger:
    """``csv/version_<n>/metrics.csv`` beside the run's own ``metrics.jsonl``; a resumed part is a version of its own."""
    return CSVLogger(save_dir=job.directory, name="csv")


@checked
def wandb_logger(
    *, job: LoggedJob, project: str, entity: str | None, group: str | None, init_timeout_s: PositiveFloat
) -> Logger:
    """One W&B run a job, whose name is its id, in the group of its experiment where ``group`` is None.

    Offline where no key is set, and where the server does not answer within ``init_timeout_s``; ``wandb sync`` sends it
    later. The same job goes on in the same run.

    Raises:
        ValueError: the extra is not installed, or W&B refuses the key.
    """
    if rank_zero_only.rank != 0:
        return DummyLogger()
    # Even an offline run would look up a server.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ValueError('logger=wandb needs W&B: pip install "dspark_lab[wandb]"') from error
    run: Any = wandb.run
    if run is None:
        told: dict[str, Any] = {
            "id": job.name,
            "name": job.name,
            "project": project,
            "entity": entity,
            "group": group or job.experiment,
            "job_type": job.job_type,
            "tags": job.tags,
            "dir": job.directory,
            "resume": "allow",
            "settings": wandb.Settings(init_timeout=init_timeout_s),
        }
        run = _start(told)
    return WandbLogger(experiment=run, project=project, save_dir=job.directory)


def _start(told: dict[str, Any]) -> Any:
    import wandb
    from wandb.errors import AuthenticationError, CommError, UsageError

    try:
        return wandb.init(mode=_mode(), **told)
    except (AuthenticationError, UsageError) as error:
        raise ValueError(f"logger=wandb: {error}: correct WANDB_API_KEY, or unset it to stay offline") from error
    except (CommError, TimeoutError) as error:
        console.print(f"W&B does not answer ({error}): this run stays offline; send it later with `wandb sync`")
        os.environ["WANDB_MODE"] = "offline"  # the next job of a sweep need not wait for it again
        wandb.teardown()  # its service would say that the run is in use
        return wandb.init(mode="offline", **told)


def _mode() -> Any:
    """A key in a file counts only where WANDB_MODE=online asks for it: nothing is sent by surprise."""
    return os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")


def finish_wandb(*, failed: bool) -> None:
    """End the W&B run, if there is one: else the next job of a sweep in this process would go on in it."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish(exit_code=int(failed))
