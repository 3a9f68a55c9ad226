"""``results.json``: what a run found out, written anew (atomically) at the end of each stage.

The file is flat: one record of the run, one record per stage with its accounting, one list of metrics.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dspark_lab.records import Metric
from dspark_lab.report.provenance import Machine, describe_machine, installed_versions
from dspark_lab.report.vocabulary import metric

SCHEMA_VERSION = 1
RESULTS_FILE = "results.json"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Identity of a run. ``choices`` are the Hydra choices by group, ``config`` the resolved configuration (nested).

    ``versions`` and ``machine`` describe the process that wrote last; each stage also keeps its own machine.
    """

    name: str
    choices: Mapping[str, str]
    config: Mapping[str, Any]
    config_hash: str
    command: str
    seed: int | None = None
    versions: Mapping[str, str] = field(default_factory=installed_versions)
    machine: Machine = field(default_factory=describe_machine)


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What a stage did. Accounting: ``num_in`` = ``num_out`` + sum of ``dropped`` (counts by reason).

    ``events`` counts what happened without a loss, by reason: retried, regenerated, reused from the cache ...
    ``error`` is the message of a stage that failed. ``unit`` names what is counted. ``sources`` are the cards of the
    prompt sources: name, weight, revision, licence, prompts and tokens used.
    """

    name: str
    time_s: float
    num_in: int | None = None
    num_out: int | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
    unit: str = "conversations"
    sources: Sequence[Mapping[str, Any]] = field(default_factory=list)
    error: str | None = None
    finished_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    machine: str = field(default_factory=lambda: str(describe_machine()))

    def __post_init__(self) -> None:
        if (self.num_in is None) != (self.num_out is None):
            raise ValueError(
                f"stage {self.name!r}: give both num_in ({self.num_in}) and num_out ({self.num_out}), or none"
            )
        if self.num_in is None or self.num_out is None:
            if self.dropped:
                raise ValueError(f"stage {self.name!r} dropped {dict(self.dropped)}: give num_in and num_out too")
            return
        dropped = sum(self.dropped.values())
        if self.error is None and self.num_in != self.num_out + dropped:
            raise ValueError(
                f"stage {self.name!r}: {self.num_in} {self.unit} went in, but {self.num_out} came out and {dropped} "
                f"were dropped {dict(self.dropped)}: count the other {self.num_in - self.num_out - dropped} by reason"
            )


@dataclass(frozen=True, slots=True)
class Results:
    """Content of one ``results.json``."""

    run: RunInfo
    stages: tuple[StageRecord, ...] = ()
    metrics: tuple[Metric, ...] = ()
    schema_version: int = SCHEMA_VERSION


def write_results(run_dir: Path, results: Results) -> Path:
    """Replace ``<run_dir>/results.json`` atomically: a kill at any moment leaves the old file or the new one."""
    for entry in results.metrics:
        known = metric(entry.name, entry.value, origin=entry.origin)  # refuses what the vocabulary does not know
        if entry.unit != known.unit:
            raise ValueError(f"metric {entry.name!r} has unit {entry.unit!r}: the vocabulary says {known.unit!r}")
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / RESULTS_FILE
    temporary = path.with_name(f".{RESULTS_FILE}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(asdict(results), file, indent=1, default=str)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def update_results(run_dir: Path, *, run: RunInfo, stage: StageRecord, metrics: Sequence[Metric] = ()) -> Results:
    """Add a finished (or failed) stage to ``results.json``, which is made if need be.

    A stage of the same name is replaced; a metric of the same name, origin and setting too. All others stay.

    Raises:
        ValueError: the folder holds the results of another configuration, a newer schema or a broken file.
    """
    old = read_results(run_dir) if (run_dir / RESULTS_FILE).exists() else Results(run)
    if old.run.config_hash != run.config_hash:
        raise ValueError(
            f"{run_dir / RESULTS_FILE} belongs to config {old.run.config_hash} ({old.run.name}), this run has config "
            f"{run.config_hash}: use another folder or start anew with run.fresh=true"
        )
    added = {_identity(entry) for entry in metrics}
    results = replace(
        old,
        run=run,
        stages=(*(entry for entry in old.stages if entry.name != stage.name), stage),
        metrics=(*(entry for entry in old.metrics if _identity(entry) not in added), *metrics),
        schema_version=SCHEMA_VERSION,
    )
    write_results(run_dir, results)
    return results


def read_results(run_dir: Path) -> Results:
    """The results of a run folder.

    Raises:
        ValueError: no such file, broken JSON, or a schema newer than this code knows; the file is named.
    """
    path = run_dir / RESULTS_FILE
    if not path.exists():
        raise ValueError(f"{path} does not exist: no stage of this run has finished yet")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data["schema_version"]
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"schema_version {version} is newer than {SCHEMA_VERSION}, the newest known: update dspark_lab"
            )
        machine = data["run"].pop("machine")
        run = RunInfo(**data["run"], machine=Machine(**{**machine, "gpus": tuple(machine["gpus"])}))
        stages = tuple(StageRecord(**entry) for entry in data["stages"])
        return Results(run, stages, tuple(Metric(**entry) for entry in data["metrics"]), version)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not readable as results: {error}") from error


def _identity(entry: Metric) -> str:
    return json.dumps([entry.name, entry.origin, dict(entry.setting)], sort_keys=True, default=str)
