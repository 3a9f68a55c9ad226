"""Tables of the report beyond the headline: algorithms against each other, prompt sets, resources."""

from collections.abc import Sequence

from dspark_lab.report.algorithms import Comparison, DomainLength
from dspark_lab.report.comparison import Row, row_labels
from dspark_lab.report.table import UNDEFINED, TextTable, duration, number
from dspark_lab.serving.frontier_file import FrontierFile, rate_of
from dspark_lab.serving.lengths import LoadGain


def comparisons_table(found: Sequence[Comparison]) -> TextTable:
    """Every pair: difference, what could have been found, and what may be said."""
    cells = tuple(
        (
            f"{entry.first} − {entry.second}",
            entry.verdict,
            f"{entry.difference.value:+.2f} [{entry.difference.low:+.2f}, {entry.difference.high:+.2f}]",
            UNDEFINED if entry.difference.detectable is None else f"{entry.difference.detectable:.2f}",
            UNDEFINED if entry.difference.p is None else f"{entry.difference.p:.3f}",
            " / ".join(dict.fromkeys(map(str, entry.num_seeds))),
            f"{entry.num_prompts}, {entry.how}",
        )
        for entry in found
    )
    return TextTable(
        ("pair", "verdict", "difference in acceptance length", "detectable", "p (Holm)", "seeds", "prompts"), cells
    )


def domains_table(found: Sequence[DomainLength]) -> TextTable:
    """Algorithms by prompt set."""
    domains = list(dict.fromkeys(entry.domain for entry in found))
    labels = dict.fromkeys(entry.label for entry in found)
    known = {(entry.label, entry.domain): entry for entry in found}

    def shown(label: str, domain: str) -> str:
        entry = known.get((label, domain))
        if entry is None:
            return UNDEFINED
        return f"{entry.value:.2f}" + ("" if entry.low is None else f" [{entry.low:.2f}, {entry.high:.2f}]")

    counts = {entry.domain: entry.num_prompts for entry in found}
    headers = ("drafter", *(f"{domain} ({counts[domain]} prompts)" for domain in domains))
    return TextTable(headers, tuple((label, *(shown(label, domain) for domain in domains)) for label in labels))


def resources_table(rows: Sequence[Row]) -> TextTable:
    """What training took and moved, one line a run."""
    cells = []
    for row in {id(row.run): row for row in rows}.values():
        for run in row.runs:
            label = row.label if len(row.runs) == 1 else f"{row.label}, seed {run.results.run.seed}"
            cells.append(
                (
                    label,
                    number(run.metric("num_parameters"), "{:,.0f}"),
                    number(run.metric("num_train_steps"), "{:,.0f}"),
                    number(run.metric("num_train_tokens"), "{:,.0f}"),
                    duration(run.metric("train_time_s")),
                    number(run.metric("train_tokens_per_s"), "{:,.0f}"),
                    number(run.metric("train_data_wait_share"), "{:.1%}"),
                    number(run.metric("train_mfu"), "{:.1%}"),
                    mebibytes(run.metric("train_peak_memory_bytes")),
                    mebibytes(run.metric("stored_bytes")),
                )
            )
    headers = ("drafter", "parameters", "train steps", "train tokens", "train time", "tokens/s", "waiting for data",
               "MFU", "peak memory", "stored states")  # fmt: skip
    filled = [k for k in range(len(headers)) if any(row[k] != UNDEFINED for row in cells)] or [0]
    return TextTable(tuple(headers[k] for k in filled), tuple(tuple(row[k] for k in filled) for row in cells))


def seeds_table(rows: Sequence[Row]) -> TextTable:
    """Each checkpoint by itself, where an algorithm has several."""
    cells = []
    for label, row in zip(row_labels(rows), rows, strict=True):
        if len(row.runs) > 1:
            for run in row.runs:
                found = [run.metric("acceptance_length", origin=origin) for origin in ("measured", "replayed")]
                lengths = [number(entry, "{:.2f}") for entry in found]
                cells.append((f"{label}, seed {run.results.run.seed}", *lengths, run.results.run.name))
    return TextTable(("checkpoint", "decode", "replay", "run"), tuple(cells))


def mebibytes(entry) -> str:
    if entry is None or entry.value is None:
        return UNDEFINED
    size = entry.value / 2**20
    return f"{size / 1024:,.1f} GiB" if size >= 1024 else f"{size:,.0f} MiB"


def lengths_table(frontier: FrontierFile) -> TextTable:
    """Simulated rates load by load: of the best fixed length, of one for all loads, of each scheme; and its gains."""
    by_place: dict[tuple[float, int], list[LoadGain]] = {}
    for gain in frontier.by_load:
        by_place.setdefault((gain.load, gain.num_gpus), []).append(gain)
    schemes = list(dict.fromkeys(gain.scheme for gain in frontier.by_load))
    several = len({num_gpus for _, num_gpus in by_place}) > 1
    cells = []
    for (load, num_gpus), found in by_place.items():
        known = {gain.scheme: gain for gain in found}
        row = [f"{load:g}" + (f", {num_gpus} GPUs" if several else "")]
        row += [
            f"{found[0].best_rate:.1f} ({found[0].best_length})",
            f"{found[0].one_rate:.1f} ({found[0].one_length})",
        ]
        for scheme in schemes:
            gain = known.get(scheme)
            row += (
                [UNDEFINED] * 3
                if gain is None
                else [f"{gain.rate:.1f}", f"{gain.over_best:.2f}x", f"{gain.over_one:.2f}x"]
            )
        cells.append(tuple(row))
    unit = "tokens/s/GPU" if rate_of(frontier.setting).endswith("gpu") else "tokens/s per user"
    headers = ["load", f"best fixed length, {unit}", f"one fixed length, {unit}"]
    for scheme in schemes:
        headers += [f"{scheme}, {unit}", "over the best", "over the one"]
    return TextTable(tuple(headers), tuple(cells))
