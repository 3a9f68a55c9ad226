"""``jobs.jsonl`` beside the runs: what became of each job of a sweep, one JSON object a line, appended as it ends.

A job that fails before its run has a folder leaves no other trace, and jobs may share a run; so a report asks here.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

JOBS_FILE = "jobs.jsonl"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """``key``: hash of all that the job's outcome depends on. ``error``: why it failed. ``objective``: acceptance length."""

    key: str
    overrides: tuple[str, ...]
    run: str | None
    objective: float | None = None
    error: str | None = None
    finished_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="microseconds"))

    @property
    def label(self) -> str:
        return " ".join(self.overrides) or "without overrides"


def add_job(root: Path, record: JobRecord) -> None:
    """Append a line; jobs in parallel may do so at once."""
    root.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(asdict(record)) + "\n").encode()
    file = os.open(root / JOBS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def read_jobs(root: Path) -> list[JobRecord]:
    """The newest record of each job, in the order of their ends; [] without a file. A torn last line is left out."""
    path = root / JOBS_FILE
    if not path.exists():
        return []
    newest: dict[str, JobRecord] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            values = json.loads(text)
            record = JobRecord(**{**values, "overrides": tuple(values["overrides"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: not a job ({error}): remove the line") from error
        newest.pop(record.key, None)
        newest[record.key] = record
    return list(newest.values())


def failed_jobs(roots: Sequence[Path]) -> list[JobRecord]:
    return [record for root in roots for record in read_jobs(root) if record.error]
