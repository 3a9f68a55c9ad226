"""The comparison as cells, for the console, for Markdown and for the HTML report."""

from collections.abc import Sequence
from dataclasses import dataclass

from dspark_lab.records import Metric
from dspark_lab.report.collect import Collection
from dspark_lab.report.comparison import Row, row_labels

UNDEFINED = "–"


@dataclass(frozen=True, slots=True)
class TextTable:
    """Headers and cells; the first column names the row, all others are numbers."""

    headers: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]


def comparison_table(rows: Sequence[Row]) -> TextTable:
    """The headline: acceptance length with its 95 % interval, and the speed of the loop."""
    conditions = len({row.condition for row in rows}) > 1
    headers = ("drafter", *(("setting",) if conditions else ()), *_COMPARISON_HEADERS)
    cells = tuple(
        (
            row.label,
            *((row.condition or UNDEFINED,) if conditions else ()),
            interval(row.decode),
            interval(row.replay),
            number(row.speedup, "{:.2f}x"),
            number(row.tokens_per_s, "{:.1f}"),
            number(row.plain_tokens_per_s, "{:.1f}"),
            UNDEFINED if row.num_draft_tokens is None else str(row.num_draft_tokens),
            prompts(row),
        )
        for row in rows
    )
    return TextTable(headers, cells)


_COMPARISON_HEADERS = (
    "acceptance length, decode",
    "acceptance length, replay",
    "speed-up (loop)",
    "tokens/s (loop)",
    "plain tokens/s (loop)",
    "draft tokens",
    "prompts",
)


def training_table(rows: Sequence[Row]) -> TextTable:
    """What each drafter cost to train, one row a run."""
    runs = {row.label: row.run for row in rows}
    cells = tuple(
        (
            label,
            number(run.metric("num_parameters"), "{:,.0f}"),
            number(run.metric("num_train_steps"), "{:,.0f}"),
            number(run.metric("num_train_tokens"), "{:,.0f}"),
            duration(run.metric("train_time_s")),
        )
        for label, run in runs.items()
    )
    return TextTable(("drafter", "parameters", "train steps", "train tokens", "train time"), cells)


def rates_table(rows: Sequence[Row], *, conditional: bool = False) -> TextTable:
    """Acceptance rate per draft position, one row a drafter."""
    rates = [row.conditional_rates if conditional else row.rates for row in rows]
    width = max((len(found) for found in rates), default=0)
    cells = tuple(
        (label, *(number(found[k], "{:.3f}") if k < len(found) else UNDEFINED for k in range(width)))
        for label, found in zip(row_labels(rows), rates, strict=True)
        if found
    )
    return TextTable(("drafter", *(str(k + 1) for k in range(width))), cells)


def missing(collection: Collection) -> list[str]:
    return [f"Not (wholly) compared: {problem}" for problem in collection.problems]


def interval(entry: Metric | None) -> str:
    """ "1.87 [1.80, 1.95]"; without the bracket where the interval is not defined."""
    if entry is None or entry.value is None:
        return UNDEFINED
    bracket = "" if entry.low is None else f" [{entry.low:.2f}, {entry.high:.2f}]"
    return f"{entry.value:.2f}{bracket}"


def number(entry: Metric | None, form: str) -> str:
    return UNDEFINED if entry is None or entry.value is None else form.format(entry.value)


def duration(entry: Metric | None) -> str:
    return UNDEFINED if entry is None or entry.value is None else duration_text(entry.value)


def duration_text(time_s: float) -> str:
    """ "42 s", "3 min 20 s", "2 h 05 min"."""
    seconds = round(time_s)
    minutes, hours = seconds // 60, seconds // 3600
    if minutes == 0:
        return f"{seconds} s"
    return f"{minutes} min {seconds % 60:02d} s" if hours == 0 else f"{hours} h {minutes % 60:02d} min"


def prompts(row: Row) -> str:
    """Prompts of decode and of replay, one number where they agree."""
    counts = [f"{entry.num_samples}" for entry in (row.decode, row.replay) if entry and entry.num_samples is not None]
    return " / ".join(dict.fromkeys(counts)) or UNDEFINED
