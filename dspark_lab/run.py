"""A run: its identity, its folder, and what it finds there of an earlier try."""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dspark_lab.records import content_hash

# What may change without changing what a trained drafter is; all else is part of a run's identity.
NOT_IDENTITY = frozenset(
    {"stages", "about", "expect", "run", "home", "store", "logger", "report", "evaluate", "benchmark", "export"}
)
NOT_IDENTITY_OF_TRAINER = frozenset({"max_steps", "log_every_steps", "checkpoint_every_steps"})
NOT_IDENTITY_OF_ENGINE = frozenset({"home"})
NOT_IDENTITY_OF_CALLBACKS = frozenset({"replay", "decode", "early_stop"})


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
        return self.directory / "traces.jsonl"


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved config that changes results."""
    kept = {key: value for key, value in config.items() if key not in NOT_IDENTITY}
    kept["trainer"] = {k: v for k, v in config["trainer"].items() if k not in NOT_IDENTITY_OF_TRAINER}
    kept["engine"] = {k: v for k, v in config["engine"].items() if k not in NOT_IDENTITY_OF_ENGINE}
    watching = {name: node for name, node in config["callbacks"].items() if node is not None}
    kept["callbacks"] = {k: v for k, v in watching.items() if k not in NOT_IDENTITY_OF_CALLBACKS}
    return kept


def name_run(config: Mapping[str, Any], *, experiment: str | None, drafter: str) -> tuple[str, str]:
    """(name, hash): <experiment>-<drafter>-<hash of the identity>."""
    digest = content_hash(identity(config), 8)
    return f"{experiment or 'run'}-{drafter}-{digest}", digest


@contextmanager
def open_run(root: Path, *, name: str, config_hash: str, fresh: bool) -> Iterator[Run]:
    """The run's folder, made if need be and locked while in use. ``fresh`` sets an existing one aside.

    Raises:
        ValueError: another process is in this run.
    """
    directory = root / name
    if fresh and directory.exists():
        aside = directory.with_name(f"{name}.until-{datetime.now(UTC):%Y%m%dT%H%M%S}")
        directory.rename(aside)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"run {name!r} is in use by another process ({directory / '.lock'}): wait for it, or give this one "
                "another run.name"
            ) from None
        lock.write(str(os.getpid()))
        lock.flush()
        yield Run(name, directory, config_hash)
