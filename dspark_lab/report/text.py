"""The comparison as Markdown for a README, and on the console (rich)."""

import textwrap

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dspark_lab.report.algorithms import algorithm_rows, comparisons, domain_lengths
from dspark_lab.report.collect import Collection
from dspark_lab.report.comparison import notes
from dspark_lab.report.study_tables import comparisons_table, domains_table
from dspark_lab.report.table import TextTable, comparison_table, missing, rates_table, training_table
from dspark_lab.report.verdict import verdict


def markdown(collection: Collection) -> str:
    """The answer, both tables and the notes, ready for a README."""
    rows = algorithm_rows(collection)
    compared = comparisons(rows)
    domains = domains_table(domain_lengths(rows))
    parts = [
        verdict(rows, compared),
        _markdown_table(comparison_table(rows)),
        _markdown_table(comparisons_table(compared)),
        _markdown_table(domains) if len(domains.headers) > 2 else "",
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
    rows = algorithm_rows(collection)
    compared = comparisons(rows)
    lines = [Text(f"* {note}") for note in [*notes(collection, rows), *missing(collection)]]
    (console or Console()).print(
        Group(
            Text(verdict(rows, compared), style="bold"),
            _rich_table(comparison_table(rows), title="comparison (95 % intervals)"),
            _rich_table(comparisons_table(compared), title="algorithms against each other"),
            _rich_table(training_table(rows), title="training"),
            _rich_table(rates_table(rows), title="acceptance rate by draft position (unconditional)"),
            *lines,
        )
    )


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
