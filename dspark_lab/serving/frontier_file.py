"""``frontier.json`` and ``frontier.csv`` of a run: what was simulated, for the report and for other tools."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dspark_lab.records import content_hash
from dspark_lab.serving.frontier import Point, gains, pareto
from dspark_lab.serving.lengths import LoadGain, Place, against_lengths
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

    def rates(self, name: str) -> dict[Place, float]:
        """Of a metric, where it is known."""
        found = {(record.load, record.num_gpus): record.metrics[name] for record in self.points}
        return {place: value for place, value in found.items() if value}


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


def rate_of(setting: Mapping[str, Any]) -> str:
    """The metric by which schemes are compared at one load: with given arrivals all emit as much, sooner or later."""
    return "output_tokens_per_s_per_gpu" if setting["arrivals"] == "closed" else "tokens_per_s_per_user"


def gains_by_load(
    curves: Sequence[Curve], lengths: Mapping[int, Curve], setting: Mapping[str, Any]
) -> tuple[LoadGain, ...]:
    """Of the first scheme and of the oracle over fixed lengths; "none" is the length 0."""
    name = rate_of(setting)
    known = {number: curve.rates(name) for number, curve in lengths.items()}
    plain = next((curve for curve in curves if curve.scheme == "none"), None)
    if plain is not None:
        known[0] = plain.rates(name)
    compared = [curve for curve in curves if curve is curves[0] or curve.scheme == "oracle"]
    return tuple(
        gain
        for curve in compared
        if lengths and curve.scheme != "none"
        for gain in against_lengths(curve.scheme, curve.rates(name), known)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierFile:
    """``source``: where the acceptance is from, in words. ``lengths``: curves of fixed lengths, by their names "fixed 3"."""

    setting: Mapping[str, Any]
    source: str
    curves: tuple[Curve, ...]
    gains: tuple[SchemeGain, ...]
    lengths: tuple[Curve, ...] = ()
    by_load: tuple[LoadGain, ...] = ()

    @property
    def title(self) -> str:
        """What was simulated: "kimi_k3 on gb300_nvl72, traces published/kimi_k3 (published)"."""
        known = self.setting
        return f"{known['target']} on {known['hardware']}, traces {known['traces']} ({known['acceptance']})"

    @property
    def sentences(self) -> list[str]:
        """The answer, each sentence saying that it is simulated."""
        return [f"simulated, {self.title}: {sentence}" for sentence in self.answers]

    @property
    def answers(self) -> list[str]:
        """The answer, for where it is said that it is simulated, and what."""
        others = [curve.scheme for curve in self.curves if curve.scheme not in self._firsts]
        told = [self._compared(first, other) for first in self._firsts for other in others]
        return told + [self._over_lengths(scheme) for scheme in dict.fromkeys(gain.scheme for gain in self.by_load)]

    @property
    def headline(self) -> list[str]:
        """Of the answers, those over plain decoding and over fixed lengths."""
        plain = [curve.scheme for curve in self.curves if curve.scheme == "none"]
        told = [self._compared(first, other) for first in self._firsts for other in plain if first != other]
        scheduled = {gain.scheme for gain in self.by_load}
        return told + [self._over_lengths(first) for first in self._firsts if first in scheduled] or self.answers

    @property
    def _firsts(self) -> list[str]:
        """What was simulated against its baselines."""
        return list(dict.fromkeys(gain.scheme for gain in self.gains)) or [self.curves[0].scheme]

    def _over_lengths(self, scheme: str) -> str:
        found = [gain for gain in self.by_load if gain.scheme == scheme]
        best, one = (_range([getattr(gain, name) for gain in found]) for name in ("over_best", "over_one"))
        lengths = ", ".join(f"{gain.best_length} at {gain.load:g}" for gain in found)
        bound = ", which knows what will be accepted," if scheme == "oracle" else ""
        return (
            f"{scheme}{bound} gives {best} times the rate of the best fixed length of each load ({lengths}), and {one} "
            f"times that of one length, {found[0].one_length}, for all of them."
        )

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
        first = self.curves[0].scheme.split(",")[0]
        told = content_hash([self.setting, [curve.scheme for curve in self.curves]], 8)
        return f"{first}-{self.setting['hardware']}-{told}"

    def at(self, scheme: str, load: float) -> PointRecord | None:
        """That scheme's point at that load (the first, where it has several numbers of GPUs)."""
        return next((record for record in self.points_of(scheme) if record.load == load), None)

    def points_of(self, scheme: str) -> list[PointRecord]:
        found = {curve.scheme: curve for curve in (*self.lengths, *self.curves)}.get(scheme)
        return [] if found is None else [record for record in found.points if record.point]

    def save(self, run_dir: Path) -> Path:
        """Into ``<run_dir>/frontiers/<name>``, which it returns; jobs that simulate the same run stand side by side."""
        folder = run_dir / "frontiers" / self.name
        folder.mkdir(parents=True, exist_ok=True)
        content = {"origin": "simulated", **asdict(self)}
        (folder / FRONTIER_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        with (folder / "frontier.csv").open("w", newline="", encoding="utf-8") as file:
            rows = [(curve.scheme, record) for curve in (*self.curves, *self.lengths) for record in curve.points]
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
            return cls(
                setting=data["setting"],
                source=data["source"],
                curves=_curves(data["curves"]),
                gains=tuple(SchemeGain(**gain) for gain in data["gains"]),
                lengths=_curves(data.get("lengths", ())),
                by_load=tuple(LoadGain(**gain) for gain in data.get("by_load", ())),
            )
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
        by_load = dict.fromkeys(gain for entry in group for gain in entry.by_load)
        lengths = {curve.scheme: curve for entry in group for curve in entry.lengths}
        merged.append(
            replace(
                group[0],
                curves=tuple(curves[name] for name in order),
                gains=tuple(gains),
                lengths=tuple(lengths.values()),
                by_load=tuple(by_load),
            )
        )
    return merged


def _curves(entries: Sequence[Mapping[str, Any]]) -> tuple[Curve, ...]:
    return tuple(
        Curve(entry["scheme"], tuple(PointRecord(**record) for record in entry["points"])) for entry in entries
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"
