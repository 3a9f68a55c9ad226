"""Every headline number once more, from what evaluation wrote down raw: ``traces.jsonl`` and ``timing.json``."""

from dataclasses import dataclass
from pathlib import Path

from dspark_lab.evaluation.acceptance import acceptance_metrics
from dspark_lab.evaluation.decode import read_timing
from dspark_lab.records import Metric
from dspark_lab.report.collect import RunResult
from dspark_lab.report.vocabulary import metric


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Of one run: the numbers that came out again, bit for bit, and one sentence for each that did not."""

    run: str
    equal: tuple[Metric, ...]
    different: tuple[str, ...]


def recompute(run: RunResult) -> Recomputed:
    """The newest evaluation of each origin, whose traces these are; intervals with the seed that it used.

    Raises:
        ValueError: the run has acceptance lengths but no traces.
    """
    if not run.traces:
        raise ValueError(f"{run.directory} holds no traces: nothing can be recomputed; add evaluate to stages")
    seed = run.results.run.config.get("evaluate", {}).get("seed", 0)
    again: list[Metric] = []
    for origin, traces in run.traces.items():
        newest = run.metric("acceptance_length", origin=origin)
        if newest is not None:
            again += acceptance_metrics(traces, setting=newest.setting, origin=origin, seed=seed)
    again += _speeds(run, run.directory)
    known = {(entry.name, entry.origin, str(entry.setting)): entry for entry in run.results.metrics}
    equal, different = [], []
    for entry in again:
        stored = known.get((entry.name, entry.origin, str(entry.setting)))
        if stored == entry:
            equal.append(entry)
        else:
            different.append(f"{entry.name} ({entry.origin}): stored {_shown(stored)}, from the traces {_shown(entry)}")
    return Recomputed(run.results.run.name, tuple(equal), tuple(different))


def _speeds(run: RunResult, folder: Path) -> list[Metric]:
    timing, newest = read_timing(folder), run.metric("loop_tokens_per_s", origin="measured")
    if timing is None or newest is None:
        return []
    return [
        metric(name, value, origin="measured", setting=newest.setting, num_samples=len(timing.prompts))
        for name, value in timing.speeds.items()
    ]


def _shown(entry: Metric | None) -> str:
    if entry is None:
        return "nothing"
    return f"{entry.value}" + ("" if entry.low is None else f" [{entry.low}, {entry.high}]")
