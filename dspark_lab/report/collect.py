"""Gathers run folders for a report. What cannot be compared is named, never dropped silently."""

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark_lab.evaluation.calibration import CALIBRATION_FILE, Bin, gather_rounds, read_bins, reliability
from dspark_lab.evaluation.examples import Example, read_examples
from dspark_lab.evaluation.traces import TRACES_FILE, read_all_traces
from dspark_lab.records import Metric, Trace
from dspark_lab.report.jobs import JOBS_FILE, JobRecord, failed_jobs
from dspark_lab.report.metrics_log import METRICS_FILE, Curve, Line, curve, read_metrics
from dspark_lab.report.results import RESULTS_FILE, Results, read_results
from dspark_lab.report.served import ServedPoint, read_served
from dspark_lab.serving.frontier_file import FrontierFile

NUM_BINS = 10


@dataclass(frozen=True, slots=True)
class Reliability:
    """Of draft position ``k``: predicted survival against the share accepted, and the same once calibrated."""

    k: int
    before: tuple[Bin, ...]
    after: tuple[Bin, ...] = ()


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run: its results, the lines of its curves, and what its newest evaluation left."""

    directory: Path
    results: Results
    lines: tuple[Line, ...] = ()
    frontiers: tuple[FrontierFile, ...] = ()  # simulated
    served: tuple[ServedPoint, ...] = ()  # measured in an engine
    traces: Mapping[str, tuple[Trace, ...]] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    reliability: tuple[Reliability, ...] = ()

    @property
    def drafter(self) -> str:
        return self.results.run.choices.get("drafter", self.results.run.name)

    def metric(self, name: str, *, origin: str | None = None) -> Metric | None:
        """The newest metric of that name (and origin) that has a value, whatever its setting."""
        found = [entry for entry in self.results.metrics if entry.name == name and entry.value is not None]
        found = [entry for entry in found if origin in (None, entry.origin)]
        return found[-1] if found else None

    def curve(self, name: str) -> Curve | None:
        return curve(self.lines, name)

    @property
    def incomplete(self) -> str | None:
        """Why the run has no acceptance length, or which of its stages failed; None for a whole run."""
        failed = [f"stage {stage.name} failed: {stage.error}" for stage in self.results.stages if stage.error]
        if failed:
            return "; ".join(failed)
        if self.metric("acceptance_length") is None and not self.frontiers:
            done = ", ".join(stage.name for stage in self.results.stages) or "none"
            return f"no acceptance length yet (stages done: {done})"
        return None


@dataclass(frozen=True, slots=True)
class Collection:
    """Readable runs, incomplete ones included, and the reason for each folder that is not readable."""

    runs: tuple[RunResult, ...]
    unreadable: Mapping[Path, str]
    failed_jobs: tuple[JobRecord, ...] = ()

    @property
    def problems(self) -> list[str]:
        """One sentence for each run that is missing from the comparison, or from a part of it."""
        partial = [f"{run.results.run.name}: {run.incomplete}" for run in self.runs if run.incomplete]
        jobs = [f"job {job.label}: {job.error}" for job in self.failed_jobs]
        return [*partial, *jobs, *(f"{path}: {reason}" for path, reason in self.unreadable.items())]


def collect(run_dirs: Sequence[Path | str]) -> Collection:
    """Read the runs in ``run_dirs``: run folders, folders of runs (up to two levels up), or glob patterns of either.

    Raises:
        ValueError: a folder does not exist or holds no run, a pattern matches nothing, or no run at all is readable.
    """
    directories = list(dict.fromkeys(found.resolve() for entry in run_dirs for found in _expand(entry)))
    if not directories:
        raise ValueError("report.runs is empty: name at least one run folder, a folder of runs, or a pattern")
    runs, unreadable = [], {}
    for directory in directories:
        try:
            runs.append(read_run(directory))
        except ValueError as error:
            unreadable[directory] = str(error)
    if not runs:
        reasons = "\n".join(f"  {path}: {reason}" for path, reason in unreadable.items())
        raise ValueError(f"none of the {len(directories)} runs can be read:\n{reasons}")
    # A run may be named by itself: the jobs of its whole root are not what was asked for.
    roots = {folder for folder in map(Path, run_dirs) if (folder / JOBS_FILE).exists()}
    known = [run.incomplete or "" for run in runs]
    failed = [job for job in failed_jobs(sorted(roots)) if not any(str(job.error) in reason for reason in known)]
    return Collection(tuple(runs), unreadable, tuple(failed))


def read_run(directory: Path) -> RunResult:
    """Raises ValueError that names the file which cannot be read."""
    traces = read_all_traces(directory / TRACES_FILE)
    return RunResult(
        directory,
        read_results(directory),
        tuple(read_metrics(directory)),
        FrontierFile.load_all(directory),
        read_served(directory),
        traces,
        read_examples(directory),
        _reliability(directory, traces),
    )


def _reliability(directory: Path, traces: Mapping[str, Sequence[Trace]]) -> tuple[Reliability, ...]:
    """Calibrated ones on prompts held out; else, before any calibration, those of all that was decoded, or replayed."""
    calibrated = read_bins(directory / CALIBRATION_FILE)
    if calibrated:
        return tuple(Reliability(k, before, after) for k, (before, after) in enumerate(calibrated, start=1))
    found = traces.get("measured") or traces.get("replayed") or ()
    if not found or any(step.confidence is None for trace in found for step in trace.steps):
        return ()
    rounds = gather_rounds(found)
    return tuple(
        Reliability(slot + 1, reliability(rounds, slot, num_bins=NUM_BINS))
        for slot in range(rounds.confidence.shape[1])
    )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat


def _expand(entry: Path | str) -> Iterator[Path]:
    matches = sorted(glob.glob(str(Path(entry).expanduser())))
    if not matches:
        raise ValueError(
            f"run folder {str(entry)!r} does not exist (and matches nothing as a pattern): check report.runs"
        )
    folders = [Path(match) for match in matches if Path(match).is_dir()]
    found = [run for folder in folders for run in _runs_below(folder)]
    if not found:
        raise ValueError(
            f"{str(entry)!r} holds no run: neither {RESULTS_FILE} nor {METRICS_FILE} in it or up to two levels below"
        )
    yield from found


def _runs_below(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs one level below, else those two levels below."""
    for pattern in ("", "*/", "*/*/"):
        files = [file for name in (RESULTS_FILE, METRICS_FILE) for file in folder.glob(pattern + name)]
        if files:
            return sorted({file.parent for file in files})
    return []
