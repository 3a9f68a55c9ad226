"""What the report says, before it is drawn: rows of the comparison, and what a careful reader needs with them."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark_lab.records import Metric
from dspark_lab.report.collect import Collection, RunResult, flatten

ROW_SETTINGS = ("benchmark", "temperature", "top_k", "top_p", "num_draft_tokens", "verification")
"""Settings of an evaluation that make a row of its own; the others are shown with the settings of the run."""


@dataclass(frozen=True, slots=True)
class Row:
    """One drafter at one setting. ``decode`` and ``replay`` are acceptance lengths; rates are of decode, if any.

    Several ``runs``, which differ in their seed, make a row of means.
    """

    label: str
    runs: tuple[RunResult, ...]
    setting: Mapping[str, Any]
    decode: Metric | None
    replay: Metric | None
    rates: tuple[Metric, ...]
    conditional_rates: tuple[Metric, ...]
    tokens_per_s: Metric | None
    plain_tokens_per_s: Metric | None
    speedup: Metric | None

    @property
    def run(self) -> RunResult:
        return self.runs[0]

    @property
    def acceptance(self) -> Metric | None:
        """What the row is ranked by: decode, else replay."""
        return self.decode or self.replay

    @property
    def condition(self) -> str:
        """What was asked of every drafter alike: "gsm_symbolic, temperature 0". Draft tokens are the drafter's own."""
        idle = {"top_k": 0, "top_p": 1.0, "verification": "token"}  # left out at these values, where they do nothing
        return ", ".join(
            str(value) if key == "benchmark" else f"{key.replace('_', ' ')} {_as_given(value)}"
            for key, value in self.setting.items()
            if key != "num_draft_tokens" and value is not None and idle.get(key) != value
        )

    @property
    def num_draft_tokens(self) -> int | None:
        return self.setting.get("num_draft_tokens")


def comparison_rows(collection: Collection) -> list[Row]:
    """One row per run and evaluated setting, best acceptance length first; runs without one come last."""
    labels = run_labels(collection.runs)
    rows = [row for run, label in zip(collection.runs, labels, strict=True) for row in _rows_of(run, label)]
    return ranked(rows)


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Best acceptance length first; rows without one last."""
    return sorted(rows, key=lambda row: -(row.acceptance.value or 0.0) if row.acceptance else math.inf)


def row_labels(rows: Sequence[Row]) -> list[str]:
    """Unlike labels for the rows: the run's, with the setting where a run has several."""
    counts = Counter(row.label for row in rows)
    return [
        f"{row.label} ({row.condition}, {row.num_draft_tokens} draft tokens)" if counts[row.label] > 1 else row.label
        for row in rows
    ]


def run_labels(runs: Sequence[RunResult]) -> list[str]:
    """The drafter's name; where runs share it, with the settings in which they differ, or the run's name."""
    return labels_of(runs, ignored=lambda key: False)


def labels_of(runs: Sequence[RunResult], *, ignored: Callable[[str], bool]) -> list[str]:
    """``run_labels`` that say nothing of the settings that are ``ignored``."""
    labels = []
    for run in runs:
        same = [other for other in runs if other.drafter == run.drafter]
        differing = [key for key in differing_settings(same) if not ignored(key)]
        short = [f"{key.rpartition('.')[2]}={_as_given(flatten(run.results.run.config).get(key))}" for key in differing]
        suffix = (
            "" if len(same) == 1 else f" ({', '.join(short)})" if 1 <= len(short) <= 4 else f" ({run.results.run.name})"
        )
        labels.append(run.drafter + suffix)
    counts = Counter(labels)
    return [
        label if counts[label] == 1 else f"{run.drafter} ({run.results.run.name}, {run.directory.name})"
        for run, label in zip(runs, labels, strict=True)
    ]


def differing_settings(runs: Sequence[RunResult]) -> list[str]:
    """Dotted config keys whose value is not the same in all runs; a missing key counts as a value.

    ``run.*`` names and places a run, so it always differs and never matters.
    """
    configs = [flatten(run.results.run.config) for run in runs]
    keys = sorted({key for config in configs for key in config if not key.startswith("run.")})
    missing = object()
    return [key for key in keys if any(config.get(key, missing) != configs[0].get(key, missing) for config in configs)]


def notes(collection: Collection, rows: Sequence[Row]) -> list[str]:
    """What a reader has to know before comparing: seeds, unlike settings, unlike machines, unlike targets."""
    runs = collection.runs
    said = []
    seeds = [len(row.runs) for row in rows if row.acceptance]
    if seeds and max(seeds) == 1:
        said.append("One checkpoint per drafter: intervals are over prompts only, not over training seeds.")
    elif seeds:
        said.append(
            "Rows of several seeds: mean over them, intervals over seeds and prompts (hierarchical bootstrap)."
            + (" Rows of one or two seeds allow no claim about the algorithm." if min(seeds) < 3 else "")
        )
    targets = {run.results.run.choices.get("target", "?") for run in runs}
    if len(targets) > 1:
        said.append(f"The runs have different targets ({', '.join(sorted(targets))}): acceptance is not comparable.")
    said += _ambiguities(runs)
    if len({row.condition for row in rows if row.acceptance}) > 1:
        said.append("Rows differ in their evaluation setting; compare rows of the same setting.")
    if len({row.decode is None for row in rows if row.acceptance}) > 1:
        said.append("Rows without real decoding are ranked by replay.")
    elsewhere = {
        stage.machine
        for run in runs
        for stage in run.results.stages
        if stage.name.startswith("evaluate") and run.metric("loop_tokens_per_s")
    }
    if len(elsewhere) > 1:
        said.append(f"Speeds were measured on different machines: {'; '.join(sorted(elsewhere))}.")
    mismatches = {row.label: row.run.metric("greedy_mismatch_rate") for row in rows}
    said += [
        f"Greedy text differs from plain decoding in {100 * entry.value:.1f} % of the prompts ({label}); "
        "in fp32 only exact ties may do that."
        for label, entry in mismatches.items()
        if entry is not None and entry.value
    ]
    if any(row.speedup or row.tokens_per_s for row in rows):
        said.append(
            "Speed (loop) is that of this package's own decoding loop at batch 1, against plain decoding of the same "
            "target in the same loop. It says nothing about a serving engine."
        )
    return said


def _ambiguities(runs: Sequence[RunResult]) -> list[str]:
    said = []
    for run in runs:
        found = Counter(
            f"{entry.origin}, {_row_setting(entry)}"
            for entry in run.results.metrics
            if entry.name == "acceptance_length"
        )
        said += [
            f"{run.results.run.name} holds {count} acceptance lengths ({where}) that differ in other settings; "
            "the newest is shown."
            for where, count in found.items()
            if count > 1
        ]
    return said


def _rows_of(run: RunResult, label: str) -> list[Row]:
    settings: dict[str, dict[str, Any]] = {}
    for entry in run.results.metrics:
        if entry.name in ("acceptance_length", "loop_tokens_per_s") and entry.value is not None:
            setting = _row_setting(entry)
            settings.setdefault(str(setting), setting)
    return [_row(run, label, setting) for setting in settings.values()] or [_row(run, label, {})]


def _row(run: RunResult, label: str, setting: Mapping[str, Any]) -> Row:
    here = [entry for entry in run.results.metrics if _row_setting(entry) == setting]

    def newest(name: str, origin: str = "measured") -> Metric | None:
        found = [entry for entry in here if (entry.name, entry.origin) == (name, origin) and entry.value is not None]
        return found[-1] if found else None

    decode, replay = newest("acceptance_length"), newest("acceptance_length", "replayed")

    def positions(name: str) -> tuple[Metric, ...]:
        """The rates that belong to the acceptance length shown, in every setting, the checkpoint included."""
        length = decode or replay
        if length is None:
            return ()
        same = [entry for entry in here if (entry.origin, entry.setting) == (length.origin, length.setting)]
        rates = {entry.name: entry for entry in same if entry.name.startswith(f"{name}_")}
        return tuple(rates[f"{name}_{k + 1}"] for k in range(len(rates)))

    return Row(
        label=label,
        runs=(run,),
        setting=setting,
        decode=decode,
        replay=replay,
        rates=positions("acceptance_rate"),
        conditional_rates=positions("conditional_acceptance_rate"),
        tokens_per_s=newest("loop_tokens_per_s"),
        plain_tokens_per_s=newest("loop_plain_tokens_per_s"),
        speedup=newest("loop_speedup"),
    )


def _row_setting(entry: Metric) -> dict[str, Any]:
    return {key: entry.setting[key] for key in ROW_SETTINGS if key in entry.setting}


def _as_given(value: Any) -> str:
    """As an override has it."""
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)
