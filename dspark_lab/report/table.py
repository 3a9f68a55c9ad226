"""The comparison as a table: for the console (rich), for Markdown, and as cells for the HTML report."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dspark_lab.records import Metric
from dspark_lab.report.collect import Collection
from dspark_lab.report.comparison import Row, comparison_rows, notes, row_labels, verdict

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


def markdown(collection: Collection) -> str:
    """The answer, both tables and the notes, ready for a README."""
    rows = comparison_rows(collection)
    parts = [
        verdict(rows),
        _markdown_table(comparison_table(rows)),
        _markdown_table(training_table(rows)),
        "Acceptance rate by draft position (unconditional):",
        _markdown_table(rates_table(rows)),
        "Acceptance rate by draft position, given the prefix (conditional):",
        _markdown_table(rates_table(rows, conditional=True)),
        "\n".join(f"* {note}" for note in [*notes(collection, rows), *missing(collection)]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def print_comparison(collection: Collection, console: Console | None = None) -> None:
    """The same on the console."""
    rows = comparison_rows(collection)
    lines = [Text(f"* {note}") for note in [*notes(collection, rows), *missing(collection)]]
    (console or Console()).print(
        Group(
            Text(verdict(rows), style="bold"),
            _rich_table(comparison_table(rows), title="comparison (95 % intervals over prompts)"),
            _rich_table(training_table(rows), title="training"),
            _rich_table(rates_table(rows), title="acceptance rate by draft position (unconditional)"),
            *lines,
        )
    )


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
    """ "42 s", "3 min 20 s", "2 h 05 min"."""
    if entry is None or entry.value is None:
        return UNDEFINED
    seconds = round(entry.value)
    minutes, hours = seconds // 60, seconds // 3600
    if minutes == 0:
        return f"{seconds} s"
    return f"{minutes} min {seconds % 60:02d} s" if hours == 0 else f"{hours} h {minutes % 60:02d} min"


def prompts(row: Row) -> str:
    """Prompts of decode and of replay, one number where they agree."""
    counts = [f"{entry.num_samples}" for entry in (row.decode, row.replay) if entry and entry.num_samples is not None]
    return " / ".join(dict.fromkeys(counts)) or UNDEFINED


def _markdown_table(table: TextTable) -> str:
    if not table.cells:
        return ""
    rule = ["---", *["---:"] * (len(table.headers) - 1)]
    lines = [[text.replace("|", "\\|") for text in row] for row in (table.headers, *table.cells)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def _rich_table(table: TextTable, title: str | None = None) -> Table | Text:
    """Fits 80 columns: headers and intervals are broken at their own places, not wherever rich runs out of room."""
    if not table.cells:
        return Text()
    drawn = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=0)
    for index, header in enumerate(table.headers):
        justify, fold = ("left", True) if index == 0 else ("right", False)
        drawn.add_column(Text(textwrap.fill(header, 10)), justify=justify, overflow="fold", no_wrap=not fold)
    for row in table.cells:
        drawn.add_row(*(Text(cell.replace(" [", "\n[")) for cell in row))
    return drawn
