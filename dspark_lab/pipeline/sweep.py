"""One job of a sweep: done once, waited for where another one holds its run, recorded whatever becomes of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from dspark_lab.pipeline.parts import Parts
from dspark_lab.progress import console
from dspark_lab.records import content_hash
from dspark_lab.report.jobs import JobRecord, add_job, read_jobs
from dspark_lab.report.results import RESULTS_FILE, read_results

# What changes neither a job's run nor its results.
NOT_OF_THE_JOB = frozenset({"about", "expect", "run", "home", "logger", "report", "sweep", "cluster"})


def in_sweep() -> bool:
    return HydraConfig.get().mode is RunMode.MULTIRUN


def job_overrides() -> list[str]:
    """What makes this very job by itself: its overrides without the one that makes a sweep of it."""
    return [word for word in HydraConfig.get().overrides.task if not word.startswith(("+sweep=", "sweep."))]


def as_job(
    config: Mapping[str, Any],
    *,
    run_name: str,
    stages: Sequence[str],
    order: Sequence[str],
    carry_out: Callable[[], float | None],
) -> float | None:
    """Carry the job out unless it is done, and write its end into ``<run.root>/jobs.jsonl``; returns its objective.

    Args:
        config: resolved.
        order: all stages, in the order of the way through.
    """
    root = Path(config["run"]["root"])
    key = content_hash(
        {"run": run_name} | {name: value for name, value in config.items() if name not in NOT_OF_THE_JOB}
    )
    overrides = tuple(job_overrides())
    earlier = next((record for record in read_jobs(root) if record.key == key), None)
    if earlier and not earlier.error and not config["run"]["fresh"] and not _outdated(earlier, root, stages, order):
        told = "" if earlier.objective is None else f", acceptance length {earlier.objective:.2f}"
        console.print(f"[bold]{run_name}[/bold]: skipped, this job was done at {earlier.finished_at[:19]}{told}")
        return earlier.objective
    try:
        objective = carry_out()
    except Exception as error:
        add_job(root, JobRecord(key, overrides, run_name, error=str(error) or repr(error)))
        raise
    add_job(root, JobRecord(key, overrides, run_name, objective=objective))
    return objective


def _outdated(done: JobRecord, root: Path, stages: Sequence[str], order: Sequence[str]) -> bool:
    """Whether the job's results are gone, or a stage before its first one has been done since."""
    folder = root / (done.run or "")
    if not (folder / RESULTS_FILE).exists():
        return True
    before = order[: order.index(stages[0])]
    return any(stage.name in before and stage.finished_at > done.finished_at for stage in read_results(folder).stages)


@contextmanager
def sharing(parts: Parts, stage: str) -> Iterator[None]:
    """Of runs in parallel that need the same answers or states, one makes them and the others find them there."""
    path = _lock_file(parts, stage)
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.print(f"{stage}: waiting for another run that is at it ({path})")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _lock_file(parts: Parts, stage: str) -> Path | None:
    folder = parts.home / "locks"
    if stage == "regenerate":
        return folder / f"answers-{parts.target.spec.fingerprint}.lock"
    if stage == "capture" and parts.info.choices["store"] == "disk":
        return folder / f"states-{parts.manifest.content_hash}.lock"
    return None
