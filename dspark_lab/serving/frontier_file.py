"""``frontier.json`` and ``frontier.csv`` of a run: what was simulated, for the report and for other tools."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dspark_lab.records import content_hash
from dspark_lab.serving.frontier import Point, gains, pareto
from dspark_lab.serving.study import Simulated

FRONTIER_FILE = "frontier.json"


@dataclass(frozen=True, slots=True)
class PointRecord:
    """One load of one scheme. ``on_frontier``: no other load of the scheme is better in both numbers."""

    load: float
    num_gpus: int
    on_frontier: bool
    extrapolated: str | None
    metrics: Mapping[str, float | None]

    @property
    def point(self) -> Point | None:
        return Point.of(self.metrics, load=self.load, num_gpus=self.num_gpus)


@dataclass(frozen=True, slots=True)
class Curve:
    scheme: str
    points: tuple[PointRecord, ...]

    @classmethod
    def of(cls, scheme: str, simulated: Sequence[Simulated]) -> "Curve":
        best = pareto([entry.point for entry in simulated if entry.point])
        records = [
            PointRecord(
                entry.load,
                entry.num_gpus,
                entry.point in best,
                entry.extrapolated,
                {name: estimate.value for name, estimate in entry.metrics.items()},
            )
            for entry in simulated
        ]
        return cls(scheme, tuple(records))

    @property
    def known(self) -> list[Point]:
        return [record.point for record in self.points if record.point]


@dataclass(frozen=True, slots=True)
class SchemeGain:
    """Ratio of output tokens/s/GPU of two schemes at the same tokens/s/user (``interactivity``)."""

    scheme: str
    over: str
    interactivity: float
    ratio: float


def gains_over(curves: Sequence[Curve]) -> tuple[SchemeGain, ...]:
    """Of the first scheme over each other one, wherever its frontier reaches a point of the other's."""
    first, *others = curves
    return tuple(
        SchemeGain(first.scheme, other.scheme, gain.interactivity, gain.ratio)
        for other in others
        for gain in gains(first.known, other.known)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierFile:
    """``source``: where the acceptance is from, in words."""

    setting: Mapping[str, Any]
    source: str
    curves: tuple[Curve, ...]
    gains: tuple[SchemeGain, ...]

    @property
    def title(self) -> str:
        """What was simulated: "kimi_k3 on gb300_nvl72, traces published/kimi_k3 (published)"."""
        known = self.setting
        return f"{known['target']} on {known['hardware']}, traces {known['traces']} ({known['acceptance']})"

    @property
    def sentences(self) -> list[str]:
        """The answer, each sentence saying that it is simulated."""
        firsts = list(dict.fromkeys(gain.scheme for gain in self.gains)) or [self.curves[0].scheme]
        others = [curve.scheme for curve in self.curves if curve.scheme not in firsts]
        return [f"simulated, {self.title}: {self._compared(first, other)}" for first in firsts for other in others]

    def _compared(self, scheme: str, over: str) -> str:
        found = [gain for gain in self.gains if (gain.scheme, gain.over) == (scheme, over)]
        if not found:
            return f"{scheme} and {over} have no interactivity in common at these loads."
        least, most = (pick(found, key=lambda gain: gain.ratio) for pick in (min, max))
        if len(found) == 1:
            return (
                f"{scheme} gives {most.ratio:.2f} times the output of {over} at {most.interactivity:.0f} tokens/s/user."
            )
        return (
            f"{scheme} gives {least.ratio:.2f} to {most.ratio:.2f} times the output of {over} at matched interactivity "
            f"(least at {least.interactivity:.0f}, most at {most.interactivity:.0f} tokens/s/user)."
        )

    @property
    def name(self) -> str:
        """Its folder: "hardware_aware-h200-1a2b3c4d"; what was simulated otherwise has another one."""
        first = self.curves[0].scheme
        told = content_hash([self.setting, [curve.scheme for curve in self.curves]], 8)
        return f"{first}-{self.setting['hardware']}-{told}"

    def save(self, run_dir: Path) -> Path:
        """Into ``<run_dir>/frontiers/<name>``, which it returns; jobs that simulate the same run stand side by side."""
        folder = run_dir / "frontiers" / self.name
        folder.mkdir(parents=True, exist_ok=True)
        content = {"origin": "simulated", **asdict(self)}
        (folder / FRONTIER_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        with (folder / "frontier.csv").open("w", newline="", encoding="utf-8") as file:
            rows = [(curve.scheme, record) for curve in self.curves for record in curve.points]
            names = list(rows[0][1].metrics) if rows else []
            writer = csv.writer(file)
            writer.writerow(["origin", "scheme", "load", "num_gpus", "on_frontier", "extrapolated", *names])
            for scheme, record in rows:
                known = (record.load, record.num_gpus, record.on_frontier, record.extrapolated or "")
                writer.writerow(["simulated", scheme, *known, *(record.metrics[name] for name in names)])
        return folder

    @classmethod
    def load_all(cls, run_dir: Path) -> "tuple[FrontierFile, ...]":
        """Of everything that was simulated in a run. ValueError for a file that is none of ours."""
        return tuple(cls.load(path) for path in sorted(run_dir.glob(f"frontiers/*/{FRONTIER_FILE}")))

    @classmethod
    def load(cls, path: Path) -> "FrontierFile":
        """One file. ValueError if it is none of ours."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            curves = tuple(
                Curve(curve["scheme"], tuple(PointRecord(**record) for record in curve["points"]))
                for curve in data["curves"]
            )
            gains = tuple(SchemeGain(**gain) for gain in data["gains"])
            return cls(setting=data["setting"], source=data["source"], curves=curves, gains=gains)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: not readable as a frontier: {error}") from error


def together(found: Sequence[FrontierFile]) -> list[FrontierFile]:
    """Simulations of the same setting as one, so that their schedulers share a chart; a baseline of several is kept once."""
    groups: dict[str, list[FrontierFile]] = {}
    for entry in found:
        groups.setdefault(content_hash([entry.setting, entry.source]), []).append(entry)
    merged = []
    for group in groups.values():
        curves = {curve.scheme: curve for entry in group for curve in entry.curves}
        firsts = [entry.curves[0].scheme for entry in group]
        order = dict.fromkeys([*firsts, *curves])
        gains = dict.fromkeys(gain for entry in group for gain in entry.gains)
        merged.append(replace(group[0], curves=tuple(curves[name] for name in order), gains=tuple(gains)))
    return merged
