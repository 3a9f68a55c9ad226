"""``metrics.jsonl``: curves of a run, one JSON object a line, on disk as soon as written.

A line is {"step": 20, "time_s": 3.1, "tokens": 40960, "train/loss": 4.2}. What was written survives SIGKILL of the
process; at worst the last line is torn, which the reader ignores and the next writer cuts off.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"

Line = Mapping[str, Any]


class MetricsLog:
    """Appends lines to ``<run_dir>/metrics.jsonl``. ``time_s`` goes on where an earlier part of the run stopped."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / METRICS_FILE
        _cut_torn_line(self.path)
        earlier = [line["time_s"] for line in read_metrics(run_dir) if "time_s" in line]
        self._start = time.monotonic() - (max(earlier) if earlier else 0.0)
        self._file = self.path.open("ab", buffering=0)  # unbuffered: a line is one write to the system

    @property
    def time_s(self) -> float:
        return time.monotonic() - self._start

    def write(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        """One line. ``time_s`` is added where ``values`` does not bring its own; NaN and infinity become null."""
        line = {"step": step, "time_s": round(self.time_s, 3)} | {name: _plain(value) for name, value in values.items()}
        self._file.write((json.dumps(line, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        self._file.close()


def read_metrics(run_dir: Path) -> list[Line]:
    """All lines, in the order of writing; [] without a file. A torn last line is left out.

    Raises:
        ValueError: a broken line elsewhere; file and line are named.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    read = []
    for number, text in enumerate(lines[:-1], start=1):  # what follows the last newline is empty or torn
        try:
            read.append(json.loads(text))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: broken JSON ({error}): remove the line") from error
    return read


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over the course of training; all of equal length. ``tokens`` is empty if the run logged none."""

    name: str
    step: tuple[float, ...]
    time_s: tuple[float, ...]
    tokens: tuple[float, ...]
    value: tuple[float, ...]


def curve(lines: Sequence[Line], name: str) -> Curve | None:
    """The points of ``name``, or None if there are none.

    A killed run goes on from its last checkpoint: points that were written after it are superseded and left out. Lines
    without ``tokens`` (validation) take those of the newest line before them.
    """
    points: list[tuple[float, float, float, float]] = []
    tokens = 0.0
    for line in lines:
        tokens = tokens if line.get("tokens") is None else line["tokens"]
        if line.get(name) is None or line.get("step") is None:
            continue
        while points and points[-1][0] >= line["step"]:
            points.pop()
        points.append((line["step"], line["time_s"], tokens, line[name]))
    if not points:
        return None
    step, time_s, seen, value = zip(*points, strict=True)
    return Curve(name, step, time_s, seen if tokens else (), value)


def _plain(value: float) -> float | None:
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else number


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
