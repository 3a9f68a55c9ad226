"""Runs that differ in nothing but the seed are one algorithm: its rows, its prompt sets, and how algorithms differ."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dspark_lab.evaluation.acceptance import acceptance_length, count_acceptance
from dspark_lab.evaluation.hierarchy import Difference, SeedCounts, Spread, compare, spread
from dspark_lab.records import Metric, Trace, content_hash
from dspark_lab.report.collect import Collection, RunResult, flatten
from dspark_lab.report.comparison import Row, comparison_rows, labels_of, ranked
from dspark_lab.run import in_identity

ORIGINS = {"decode": "measured", "replay": "replayed"}
ONE_CHECKPOINT = "one checkpoint"


@dataclass(frozen=True, slots=True)
class DomainLength:
    """Acceptance length of one algorithm on one prompt set, mean over seeds."""

    label: str
    domain: str
    value: float
    low: float | None
    high: float | None
    num_prompts: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One pair of algorithms, by ``how`` (decode or replay), over ``num_prompts`` that both were given."""

    first: str
    second: str
    how: str
    difference: Difference
    num_seeds: tuple[int, int]
    num_prompts: int

    @property
    def verdict(self) -> str:
        found = self.difference
        if found.p is None:
            fewest = min(self.num_seeds)
            few = ONE_CHECKPOINT if fewest == 1 else f"{fewest} checkpoints"
            return f"{few}: no claim about the algorithms"
        if found.p < 0.05:
            return f"{self.first if found.value > 0 else self.second} is ahead"
        return "undecided"


def algorithm_of(run: RunResult) -> str:
    """The same for runs whose trained drafters differ in their seed only."""
    config = {key: value for key, value in flatten(run.results.run.config).items() if not _makes_no_other(key)}
    return content_hash([config, run.drafter])


def algorithm_rows(collection: Collection) -> list[Row]:
    """The rows of the comparison, those of one algorithm and setting as one; best acceptance length first."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in comparison_rows(collection):
        groups[algorithm_of(row.run), content_hash(row.setting)].append(row)
    firsts = {algorithm: group[0].run for (algorithm, _), group in reversed(groups.items())}
    labels = dict(zip(firsts, labels_of(list(firsts.values()), ignored=_makes_no_other), strict=True))
    return ranked([_merged(group, labels[algorithm]) for (algorithm, _), group in groups.items()])


def domain_lengths(rows: Sequence[Row]) -> list[DomainLength]:
    """By algorithm and prompt set, from the traces of decode, else of replay; rows without traces give none."""
    found = []
    for row in rows:
        traces = row_traces(row, "decode" if row.decode else "replay")
        for domain in dict.fromkeys(trace.domain for each in traces for trace in each):
            some = [[trace for trace in each if trace.domain == domain] for each in traces]
            counts = _counts(some, _prompts_in_common([some]))
            if counts is None:
                continue
            (known,) = spread([counts])
            value, low, high = (float(part[0]) + 1 for part in (known.value, known.low, known.high))
            ends = (None, None) if np.isnan(low) else (low, high)
            found.append(DomainLength(row.label, domain, value, ends[0], ends[1], counts.numerators.shape[1]))
    return found


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Every pair of algorithms that were asked the same, by decode where all have it, else by replay."""
    made = []
    for condition in dict.fromkeys(row.condition for row in rows if row.acceptance):
        same = [row for row in rows if row.condition == condition and row.acceptance]
        how = "decode" if all(row_traces(row, "decode") for row in same) else "replay"
        known = [(row, traces) for row in same if (traces := row_traces(row, how))]
        prompts = _prompts_in_common([traces for _, traces in known])
        counted = [(row, counts) for row, traces in known if (counts := _counts(traces, prompts)) is not None]
        if len(counted) < 2 or len(prompts) < 2:
            continue
        seeds = [counts.num_seeds for _, counts in counted]
        for difference in compare(spread([counts for _, counts in counted]), seeds):
            pair = difference.first, difference.second
            first, second = (counted[k][0].label for k in pair)
            both = seeds[pair[0]], seeds[pair[1]]
            made.append(Comparison(first, second, how, difference, both, len(prompts)))
    return made


def row_traces(row: Row, how: str) -> list[tuple[Trace, ...]]:
    """Of each of the row's runs; [] unless they are the ones that its number came from."""
    traces = []
    for run in row.runs:
        found = run.traces.get(ORIGINS[how])
        newest = run.metric("acceptance_length", origin=ORIGINS[how])
        if not found or newest is None or newest.value is None:
            return []
        other = any(newest.setting.get(key) != value for key, value in row.setting.items())
        if other or not math.isclose(acceptance_length(found), newest.value):
            return []
        traces.append(found)
    return traces


def _merged(group: Sequence[Row], label: str) -> Row:
    if len(group) == 1:
        return replace(group[0], label=label)
    group = sorted(group, key=lambda row: row.run.results.run.seed or 0)
    first = group[0]
    runs = tuple(row.run for row in group)
    merged = replace(first, label=label, runs=runs)
    lengths = {how: _merged_lengths(merged, group, how) for how in ORIGINS}
    shown = lengths["decode"] or lengths["replay"]
    return replace(
        merged,
        decode=lengths["decode"][0] if lengths["decode"] else None,
        replay=lengths["replay"][0] if lengths["replay"] else None,
        rates=tuple(shown[1]) if shown else (),
        conditional_rates=tuple(shown[2]) if shown else (),
        tokens_per_s=_mean([row.tokens_per_s for row in group]),
        plain_tokens_per_s=_mean([row.plain_tokens_per_s for row in group]),
        speedup=_mean([row.speedup for row in group]),
    )


def _merged_lengths(row: Row, group: Sequence[Row], how: str) -> tuple[Metric, list[Metric], list[Metric]] | None:
    """(length, rates, conditional rates) over the seeds, with intervals where the traces are there."""
    lengths = [getattr(each, how) for each in group]
    if any(entry is None for entry in lengths):
        return None
    traces = row_traces(row, how)
    prompts = _prompts_in_common([traces])
    counts = _counts(traces, prompts, positions=True)
    if counts is None:
        length = _mean(lengths)
        assert length is not None
        return length, [], []
    (known,) = spread([counts])
    made = [_metric(lengths[0], known, k, len(prompts)) for k in range(len(known.value))]
    width = (len(made) - 1) // 2
    return made[0], made[1 : 1 + width], made[1 + width :]


def _metric(like: Metric, known: Spread, k: int, num_prompts: int) -> Metric:
    shift = 1.0 if k == 0 else 0.0
    value, low, high = (
        None if np.isnan(part[k]) else float(part[k]) + shift for part in (known.value, known.low, known.high)
    )
    return replace(like, value=value, low=low, high=high, num_samples=num_prompts)


def _mean(entries: Sequence[Metric | None]) -> Metric | None:
    known = [entry for entry in entries if entry is not None and entry.value is not None]
    if not known:
        return None
    return replace(known[0], value=sum(entry.value or 0.0 for entry in known) / len(known), low=None, high=None)


def _prompts_in_common(traces: Sequence[Sequence[Sequence[Trace]]]) -> list[str]:
    """Prompts that every run of every algorithm was given."""
    given = [{trace.prompt_id for trace in run} for algorithm in traces for run in algorithm]
    return sorted(set.intersection(*given)) if given else []


def _counts(traces: Sequence[Sequence[Trace]], prompts: Sequence[str], *, positions: bool = False) -> SeedCounts | None:
    """Accepted over steps; with ``positions`` also the rates by position, then the conditional ones."""
    if not traces or not prompts:
        return None
    tops, bottoms = [], []
    for run in traces:
        by_prompt: Mapping[str, Any] = {trace.prompt_id: trace for trace in run}
        counts = count_acceptance([by_prompt[prompt] for prompt in prompts])
        top, bottom = [counts.accepted[:, None]], [counts.steps[:, None]]
        if positions:
            top += [counts.reached, counts.reached]
            bottom += [np.broadcast_to(counts.steps[:, None], counts.reached.shape), counts.offered]
        tops.append(np.concatenate(top, axis=1).astype(np.float64))
        bottoms.append(np.concatenate(bottom, axis=1).astype(np.float64))
    if len({top.shape for top in tops}) > 1:
        return None
    return SeedCounts(np.stack(tops), np.stack(bottoms))


def _makes_no_other(key: str) -> bool:
    """Whether a setting makes no other algorithm: a seed, or what was done with the drafter afterwards."""
    is_seed = (key == "seed" or key.endswith(".seed")) and not key.startswith("data.")
    return is_seed or not (in_identity(key) or key == "trainer.max_steps")
