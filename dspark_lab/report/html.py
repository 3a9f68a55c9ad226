"""One self-contained HTML file: the answer first, then what it rests on. It makes no request when it is opened."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from rich.console import Console

from dspark_lab.report.algorithms import DomainLength, algorithm_rows, comparisons, domain_lengths
from dspark_lab.report.charts import (
    acceptance_chart,
    calibration_chart,
    curve_chart,
    domains_chart,
    rates_chart,
    reliability_chart,
    speed_chart,
)
from dspark_lab.report.collect import Collection, collect, flatten
from dspark_lab.report.comparison import Row, differing_settings, notes, run_labels
from dspark_lab.report.predicted import served_table, simulation_of
from dspark_lab.report.serving_charts import frontier_chart, served_chart
from dspark_lab.report.study_tables import comparisons_table, domains_table, lengths_table, resources_table, seeds_table
from dspark_lab.report.table import UNDEFINED, TextTable, comparison_table, missing, rates_table
from dspark_lab.report.text import markdown, print_comparison
from dspark_lab.report.verdict import verdict
from dspark_lab.serving.frontier_file import together

# plotly 7 shows a button that uploads the chart unless both are set.
_PLOTLY_CONFIG = {"displayModeBar": False, "responsive": True, "showSendToCloud": False, "plotlyServerURL": ""}


def write_report(
    run_dirs: Sequence[Path | str],
    out: Path,
    *,
    title: str = "Drafter comparison",
    question: str | None = None,
    console: Console | None = None,
) -> Path:
    """Print the comparison, write it as HTML to ``out`` and as Markdown beside it; returns the path of the HTML file.

    Args:
        run_dirs: run folders, folders of runs, or glob patterns (see ``collect``).
        out: the file; a folder (or a path without suffix) gets ``report.html`` in it.
        question: what the runs are to answer; shown first.

    Raises:
        ValueError: a folder that does not exist or holds no run; it is named.
    """
    collection = collect(run_dirs)
    print_comparison(collection, console)
    path = out if out.suffix else out / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_html(collection, title=title, question=question), encoding="utf-8")
    asked = f"{question}\n\n" if question else ""
    path.with_suffix(".md").write_text(f"# {title}\n\n{asked}{markdown(collection)}", encoding="utf-8")
    return path


def render_html(collection: Collection, *, title: str, question: str | None = None) -> str:
    """The whole page; equal collections give equal pages."""
    rows = algorithm_rows(collection)
    compared, domains = comparisons(rows), domain_lengths(rows)
    frontiers = {
        f"frontier_{number}": frontier
        for number, frontier in enumerate(together([found for run in collection.runs for found in run.frontiers]))
    }
    served = {
        f"served_{index}": (label, run.served, simulation_of(run.served, run.frontiers))
        for index, (label, run) in enumerate(zip(run_labels(collection.runs), collection.runs, strict=True))
        if run.served
    }
    reliable = {
        f"reliability_{number}": (row.label, row.run.reliability)
        for number, row in enumerate(_once(rows))
        if row.run.reliability
    }
    charts = _charts(rows, domains)
    charts |= {name: frontier_chart(frontier) for name, frontier in frontiers.items()}
    charts |= {name: reliability_chart(found) for name, (_, found) in reliable.items()}
    found = {name: served_chart(points, simulated) for name, (_, points, simulated) in served.items()}
    charts |= {name: figure for name, figure in found.items() if figure is not None}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    stages = [stage for run in collection.runs for stage in run.results.stages]
    return environment.get_template("template.html.jinja").render(
        title=title,
        question=question,
        verdict=verdict(rows, compared),
        updated=max((stage.finished_at for stage in stages), default=UNDEFINED),
        plotly_js=Markup(get_plotlyjs()),
        headline=comparison_table(rows),
        seeds=seeds_table(rows),
        compared=comparisons_table(compared),
        condition=", ".join(conditions) if len(conditions := {row.condition for row in rows}) == 1 else "",
        domains=domains_table(domains),
        training=resources_table(rows),
        rates=rates_table(rows),
        conditional_rates=rates_table(rows, conditional=True),
        notes=notes(collection, rows),
        served=[
            (name, label, served_table(points, simulated), simulated)
            for name, (label, points, simulated) in served.items()
        ],
        frontiers=[(name, frontier, lengths_table(frontier)) for name, frontier in frontiers.items()],
        reliable=[(name, label) for name, (label, _) in reliable.items()],
        examples=[(row.label, row.run.examples) for row in _once(rows) if row.run.examples],
        missing=missing(collection),
        heights={name: figure.layout.height for name, figure in charts.items()},
        calls=[_call(name, figure) for name, figure in charts.items()],
        differing=_settings_table(collection, differing=True),
        common=_settings_table(collection, differing=False),
        evaluation=_evaluation_table(rows),
        accounting=_accounting_table(collection),
        machines=_machines_table(collection),
        commands=[
            (label, run.results.run.command)
            for label, run in zip(run_labels(collection.runs), collection.runs, strict=True)
        ],
    )


def _once(rows: Sequence[Row]) -> list[Row]:
    """Without further rows of the same runs."""
    return list({id(row.run): row for row in reversed(rows)}.values())[::-1]


def _charts(rows: Sequence[Row], domains: Sequence[DomainLength]) -> dict[str, go.Figure]:
    """Charts by name, without those that have nothing to show."""
    acceptance = ("val/acceptance_length", "val/acceptance_length_estimate")
    figures: dict[str, go.Figure | None] = {
        "acceptance": acceptance_chart(rows) if any(row.acceptance for row in rows) else None,
        "domains": domains_chart(domains),
        "rates": rates_chart(rows, conditional=False) if any(row.rates for row in rows) else None,
        "conditional_rates": rates_chart(rows, conditional=True)
        if any(row.conditional_rates for row in rows)
        else None,
        "loss_time": curve_chart(rows, ["train/loss"], over="time_s", axis="train/loss"),
        "loss_tokens": curve_chart(rows, ["train/loss"], over="tokens", axis="train/loss"),
        "val_time": curve_chart(rows, acceptance, over="time_s", axis="val/acceptance_length"),
        "val_tokens": curve_chart(rows, acceptance, over="tokens", axis="val/acceptance_length"),
        "calibration": calibration_chart(rows),
        "speed": speed_chart(rows),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _call(name: str, figure: go.Figure) -> Markup:
    """The call that draws one chart. They stand at the page's end: drawn earlier, a chart takes the width of a layout
    that is not finished."""
    # Not plotly.io.to_html: it takes plotlyServerURL out of the config again, and plotly.js then falls back to its own.
    drawn = f"{figure.to_json()}, {json.dumps(_PLOTLY_CONFIG)}".replace("</", "<\\/")
    return Markup(f"((figure, config) => Plotly.newPlot('chart-{name}', figure.data, figure.layout, config))({drawn});")


def _settings_table(collection: Collection, *, differing: bool) -> TextTable:
    """Settings in which the runs differ, a column a run; or the common ones, in one column."""
    configs = [flatten(run.results.run.config) for run in collection.runs]
    unlike = differing_settings(collection.runs)
    if differing:
        cells = [(key, *(_shown(config.get(key, UNDEFINED)) for config in configs)) for key in unlike]
        return TextTable(("setting", *run_labels(collection.runs)), tuple(cells))
    common = [
        (key, _shown(value))
        for key, value in configs[0].items()
        if key not in unlike and key.partition(".")[0] != "run"
    ]
    return TextTable(("setting", "value"), tuple(common))


def _evaluation_table(rows: Sequence[Row]) -> TextTable:
    """The setting with which each acceptance length was measured: a number without its setting is no number."""
    found = [(row, kind, entry) for row in rows for kind in ("decode", "replay") if (entry := getattr(row, kind))]
    cells = [
        (
            f"{row.label}, {kind}",
            entry.origin,
            str(entry.num_samples),
            ", ".join(f"{key} {_shown(value)}" for key, value in entry.setting.items()),
        )
        for row, kind, entry in found
    ]
    return TextTable(("number", "origin", "prompts", "setting"), tuple(cells))


def _accounting_table(collection: Collection) -> TextTable:
    cells = []
    for label, run in zip(run_labels(collection.runs), collection.runs, strict=True):
        for stage in run.results.stages:
            cells.append(
                (
                    f"{label}, {stage.name}",
                    UNDEFINED if stage.num_in is None else f"{stage.num_in:,}",
                    UNDEFINED if stage.num_out is None else f"{stage.num_out:,}",
                    _reasons(stage.dropped) if stage.num_in is not None else UNDEFINED,
                    _reasons(stage.events),
                    stage.unit if stage.num_in is not None else UNDEFINED,
                    f"{stage.time_s:,.1f} s",
                    stage.error or "done",
                )
            )
    return TextTable(("stage", "in", "out", "dropped", "also", "of", "time", "state"), tuple(cells))


def _machines_table(collection: Collection) -> TextTable:
    cells = [
        (
            label,
            str(run.results.run.machine),
            ", ".join(f"{package} {version}" for package, version in run.results.run.versions.items()),
            run.results.run.name,
            run.results.run.config_hash,
        )
        for label, run in zip(run_labels(collection.runs), collection.runs, strict=True)
    ]
    return TextTable(("drafter", "machine", "versions", "run", "config"), tuple(cells))


def _reasons(counts: Any) -> str:
    return ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in counts.items() if count) or "none"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
