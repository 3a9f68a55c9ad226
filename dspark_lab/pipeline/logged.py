"""The job as its logger sees it, from start to end."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.sweep import in_sweep
from dspark_lab.report.collect import read_run
from dspark_lab.report.results import RESULTS_FILE
from dspark_lab.report.wandb_record import record
from dspark_lab.training.loggers import LoggedJob, finish_wandb

FAMILIES = ("train", "evaluate", "serve", "simulate")


def logged_job(parts: Parts) -> LoggedJob:
    choices = parts.info.choices
    stages = [parts.config.stages] if isinstance(parts.config.stages, str) else list(parts.config.stages)
    shown = ("drafter", "target", "data", "loss", "benchmark")
    return LoggedJob(
        directory=parts.run.directory,
        name=parts.run.name,
        experiment=choices.get("experiment", "run"),
        job_type=next((family for family in FAMILIES if family in stages), "report"),
        tags=(*(f"{group}={choices[group]}" for group in shown), *(["sweep"] if in_sweep() else [])),
    )


@contextmanager
def logged(parts: Parts) -> Iterator[None]:
    """Whatever becomes of the job, its W&B run (logger=wandb) ends with it, with what was found out and an exit code."""
    if parts.info.choices["logger"] != "wandb":
        yield
        return
    failed = True
    try:
        yield
        failed = False
    finally:
        try:
            if (parts.run.directory / RESULTS_FILE).exists():
                build(parts.config, "logger", job=logged_job(parts))  # opens the run where training left none open
                record(read_run(parts.run.directory), sys.modules["wandb"].run)
        finally:
            finish_wandb(failed=failed)
