"""A run: its identity, its folder, and what it finds there of an earlier try."""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dspark_lab.evaluation.calibration import CALIBRATION_FILE
from dspark_lab.evaluation.traces import GATE_TRACES_FILE, TRACES_FILE
from dspark_lab.progress import console
from dspark_lab.records import content_hash

# What may change without changing what a trained drafter is; all else is part of a run's identity.
NOT_IDENTITY = frozenset(
    {
        "stages",
        "about",
        "expect",
        "run",
        "home",
        "store",
        "cluster",
        "live",
        "logger",
        "report",
        "evaluate",
        "benchmark",
        "published",
        "calibrate",
        "scheduler",
        "export",
        "serve",
        "profile",
        "hardware",
        "traces",
        "simulate",
        "plan",
        "sweep",
    }
)
NOT_IDENTITY_WITHIN = {
    "trainer": frozenset({"max_steps", "log_every_steps", "checkpoint_every_steps"}),
    "target": frozenset({"serving", "facts"}),
    "engine": frozenset(
        {
            "home",
            "endpoints",
            "endpoints_file",
            "concurrency",
            "timeout_s",
            "payload_folder",
            "payload_timeout_s",
            "patience_s",
            "probe",
        }
    ),
    "data": frozenset({"source", "num_workers", "prefetch_factor"}),
    "callbacks": frozenset({"replay", "decode", "early_stop"}),
}
# These count only by their product, the rows of an optimizer step: a run may go on with another number of ranks.
ROWS_OF_A_STEP = {
    "trainer": frozenset({"strategy", "devices", "num_nodes", "accumulate"}),
    "data": frozenset({"rows_per_batch"}),
}


@dataclass(frozen=True, slots=True)
class Run:
    """``directory`` is ``<run.root>/<name>``; the same command gives the same name, so it goes on where it stopped."""

    name: str
    directory: Path
    config_hash: str

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def traces(self) -> Path:
        return self.directory / TRACES_FILE

    @property
    def gate_traces(self) -> Path:
        """Replayed as the deployment drafts and verifies, where that is not as evaluated."""
        return self.directory / GATE_TRACES_FILE

    @property
    def calibration(self) -> Path:
        return self.directory / CALIBRATION_FILE


def identity(config: Mapping[str, Any], *, num_ranks: int) -> dict[str, Any]:
    """The part of a resolved config that changes results."""
    kept = {key: value for key, value in config.items() if key not in NOT_IDENTITY}
    for group, names in NOT_IDENTITY_WITHIN.items():
        left_out = names | ROWS_OF_A_STEP.get(group, frozenset())
        kept[group] = {key: value for key, value in config[group].items() if key not in left_out}
    kept["callbacks"] = {name: node for name, node in kept["callbacks"].items() if node is not None}
    kept["rows_per_step"] = config["data"]["rows_per_batch"] * config["trainer"]["accumulate"] * num_ranks
    return kept


def in_identity(key: str) -> bool:
    """Whether a dotted key of a config tells trained drafters apart; how long they were trained is beside it."""
    group, _, name = key.partition(".")
    return group not in NOT_IDENTITY and name.partition(".")[0] not in NOT_IDENTITY_WITHIN.get(group, ())


def name_run(config: Mapping[str, Any], *, experiment: str | None, drafter: str, num_ranks: int = 1) -> tuple[str, str]:
    """(name, hash): <experiment>-<drafter>-<hash of the identity>."""
    digest = content_hash(identity(config, num_ranks=num_ranks), 8)
    return f"{experiment or 'run'}-{drafter}-{digest}", digest


@contextmanager
def open_run(
    root: Path, *, name: str, config_hash: str, fresh: bool, lock: bool = True, wait: bool = False
) -> Iterator[Run]:
    """The run's folder, made if need be and locked while in use. ``fresh`` sets an existing one aside.

    ``lock=False`` is for the processes of a training group whose first one holds the lock. ``wait`` is for the jobs of a
    sweep that share a run: the later one waits until the earlier one has left it.

    Raises:
        ValueError: another process is in this run, and ``wait`` is not set.
    """
    directory = root / name
    if fresh and directory.exists():
        aside = directory.with_name(f"{name}.until-{datetime.now(UTC):%Y%m%dT%H%M%S}")
        directory.rename(aside)
    directory.mkdir(parents=True, exist_ok=True)
    if not lock:
        yield Run(name, directory, config_hash)
        return
    with (directory / ".lock").open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise ValueError(
                    f"run {name!r} is in use by another process ({directory / '.lock'}): wait for it, or give this one "
                    "another run.name"
                ) from None
            console.print(f"{name}: waiting for another job that is in this run ({directory / '.lock'})")
            fcntl.flock(held, fcntl.LOCK_EX)
        held.write(str(os.getpid()))
        held.flush()
        yield Run(name, directory, config_hash)
