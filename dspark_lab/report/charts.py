"""The charts of the report, as plotly figures. Axes carry units; a drafter keeps its colour and marker."""

from collections.abc import Sequence

import plotly.graph_objects as go

from dspark_lab.report.algorithms import DomainLength
from dspark_lab.report.collect import Reliability
from dspark_lab.report.comparison import Row, row_labels

# Dark enough for 4.5 : 1 on white, and told apart without colour vision by the marker.
COLOURS = ("#0b5cad", "#b04a00", "#00705c", "#8a2f7d", "#6b5900", "#4b5563", "#a3123a", "#245b1f")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
MIN_ROUNDS = 20
"""Of a bin that the reliability diagram shows."""
INK, SOFT, GRID = "#1f2933", "#5f6b78", "#e3e7ec"


def acceptance_chart(rows: Sequence[Row]) -> go.Figure:
    """Acceptance length by drafter, decode and replay, with 95 % intervals."""
    figure = blank_figure("acceptance length (tokens per verify step)", "")
    labels = row_labels(rows)
    for offset, (name, symbol) in enumerate((("decode", "circle"), ("replay", "circle-open"))):
        found = [
            (label, row.decode if name == "decode" else row.replay) for label, row in zip(labels, rows, strict=True)
        ]
        entries = [(label, entry) for label, entry in found if entry is not None]
        if not entries:
            continue
        figure.add_scatter(
            x=[entry.value for _, entry in entries],
            y=[labels.index(label) + (offset - 0.5) * 0.24 for label, _ in entries],
            customdata=[label for label, _ in entries],
            mode="markers",
            name=name,
            error_x=_error(entry for _, entry in entries),
            marker={
                "symbol": symbol,
                "size": 11,
                "color": (INK, SOFT)[offset],
                "line": {"width": 2, "color": (INK, SOFT)[offset]},
            },
            hovertemplate="%{customdata}: %{x:.3f}<extra>" + name + "</extra>",
        )
    figure.update_yaxes(
        tickvals=list(range(len(labels))), ticktext=[_wrap(label) for label in labels], range=[len(labels) - 0.5, -0.5]
    )
    figure.update_xaxes(rangemode="normal", autorangeoptions={"include": 1.0})  # 1 is plain decoding
    figure.update_layout(height=150 + 62 * len(labels))
    return figure


def rates_chart(rows: Sequence[Row], *, conditional: bool) -> go.Figure:
    """Acceptance rate per draft position with 95 % intervals, a line a drafter."""
    figure = blank_figure("draft position", "acceptance rate" + (", given the prefix" if conditional else ""))
    for index, (label, row) in enumerate(zip(row_labels(rows), rows, strict=True)):
        rates = row.conditional_rates if conditional else row.rates
        if not rates:
            continue
        figure.add_scatter(
            x=[k + 1 for k in range(len(rates))],
            y=[entry.value for entry in rates],
            error_y=_error(rates),
            name=label,
            mode="lines+markers",
            **line_style(index),
            hovertemplate="position %{x}: %{y:.3f}<extra>" + label + "</extra>",
        )
    figure.update_yaxes(range=[0, 1.03], tickformat=".1f")
    figure.update_xaxes(dtick=1)
    return figure


def curve_chart(rows: Sequence[Row], names: Sequence[str], *, over: str, axis: str) -> go.Figure | None:
    """Curves of all runs over ``over`` ("time_s" or "tokens"), the second of ``names`` dotted; None without a point.

    Runs of one row have its colour; a run that has several rows is drawn once.
    """
    figure = blank_figure({"time_s": "training time, minutes", "tokens": "tokens trained on"}[over], axis)
    named: set[str] = set()
    drawn: set[str] = set()
    labels = list(dict.fromkeys(row.label for row in rows))
    for row in rows:
        for run in row.runs:
            if str(run.directory) in drawn:
                continue
            drawn.add(str(run.directory))
            for dash, name in zip(("solid", "dot"), names, strict=False):
                curve = run.curve(name)
                x = () if curve is None else tuple(t / 60 for t in curve.time_s) if over == "time_s" else curve.tokens
                if curve is None or not x:
                    continue
                style = line_style(labels.index(row.label))
                style["line"] = style["line"] | {"dash": dash, "width": 2 if len(row.runs) == 1 else 1.3}
                style["marker"] = style["marker"] | {"size": 8 if len(row.runs) == 1 else 5}
                legend = {"name": row.label, "legendgroup": row.label, "showlegend": row.label not in named}
                named.add(row.label)
                told = f"{row.label}, {name}" + (f", seed {run.results.run.seed}" if len(row.runs) > 1 else "")
                figure.add_scatter(
                    x=x,
                    y=curve.value,
                    mode="lines" if len(x) > 30 else "lines+markers",
                    hovertemplate=f"%{{y:.3f}}<extra>{told}</extra>",
                    **legend,
                    **style,
                )
    return figure if figure.data else None


def domains_chart(found: Sequence[DomainLength]) -> go.Figure | None:
    """Acceptance length by prompt set, a marker an algorithm. None where there is one prompt set only."""
    domains = list(dict.fromkeys(entry.domain for entry in found))
    if len(domains) < 2:
        return None
    labels = list(dict.fromkeys(entry.label for entry in found))
    figure = blank_figure("acceptance length (tokens per verify step)", "")
    for index, label in enumerate(labels):
        entries = [entry for entry in found if entry.label == label]
        offset = (index - (len(labels) - 1) / 2) * 0.7 / len(labels)
        style = line_style(index)
        figure.add_scatter(
            x=[entry.value for entry in entries],
            y=[domains.index(entry.domain) + offset for entry in entries],
            customdata=[entry.domain for entry in entries],
            error_x=_error(entries),
            name=label,
            mode="markers",
            marker=style["marker"] | {"size": 10},
            hovertemplate="%{customdata}: %{x:.3f}<extra>" + label + "</extra>",
        )
    figure.update_yaxes(tickvals=list(range(len(domains))), ticktext=domains, range=[len(domains) - 0.5, -0.5])
    figure.update_xaxes(autorangeoptions={"include": 1.0})
    figure.update_layout(height=150 + len(domains) * (30 + 16 * len(labels)))
    return figure


def reliability_chart(found: Sequence[Reliability]) -> go.Figure:
    """Predicted survival against what was accepted: up to four draft positions; dotted as drafted where calibrated."""
    figure = blank_figure("predicted: the first k draft tokens are accepted", "accepted")
    figure.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", line={"color": "#8b97a4", "width": 1}, hoverinfo="skip", showlegend=False
    )
    wanted = [1, 2, 4, found[-1].k] if found[-1].k > 4 else [entry.k for entry in found]
    for index, entry in enumerate(entry for entry in found if entry.k in wanted):
        kinds = (
            ((entry.before, "dot", False), (entry.after, "solid", True))
            if entry.after
            else ((entry.before, "solid", True),)
        )
        for all_bars, dash, named in kinds:
            bars = [bar for bar in all_bars if bar.num_rounds >= MIN_ROUNDS]
            if not bars:
                continue
            style = line_style(index)
            style["line"] = style["line"] | {"dash": dash}
            figure.add_scatter(
                x=[bar.survival for bar in bars],
                y=[bar.accepted for bar in bars],
                customdata=[bar.num_rounds for bar in bars],
                name=f"k = {entry.k}",
                legendgroup=str(entry.k),
                showlegend=named,
                mode="lines+markers",
                hovertemplate="predicted %{x:.2f}, accepted %{y:.2f}, %{customdata} rounds<extra>k = "
                + f"{entry.k}</extra>",
                **style,
            )
    figure.update_xaxes(range=[-0.02, 1.02], tickformat=".1f")
    figure.update_yaxes(range=[-0.02, 1.05], tickformat=".1f")
    figure.update_layout(height=360)
    return figure


def speed_chart(rows: Sequence[Row]) -> go.Figure | None:
    """Tokens per second of the loop, speculative beside plain. None when no run measured it."""
    shown = [(label, row) for label, row in zip(row_labels(rows), rows, strict=True) if row.tokens_per_s]
    if not shown:
        return None
    figure = blank_figure("", "tokens/s (loop, batch 1)")
    bars = (
        ("plain", "#9aa5b1", [row.plain_tokens_per_s for _, row in shown]),
        ("speculative", COLOURS[0], [row.tokens_per_s for _, row in shown]),
    )
    for name, colour, entries in bars:
        values = [entry.value if entry else None for entry in entries]
        figure.add_bar(
            x=[_wrap(label) for label, _ in shown],
            y=values,
            name=name,
            marker_color=colour,
            text=["" if value is None else f"{value:.1f}" for value in values],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y:.2f} tokens/s<extra>" + name + "</extra>",
        )
    return figure


def calibration_chart(rows: Sequence[Row]) -> go.Figure | None:
    """Calibration error per draft position, before (dotted) and after calibration. None when no run was calibrated."""
    figure = blank_figure("draft position", "calibration error of the survival")
    runs = {row.label: row.run for row in rows}  # the first seed's; a run that has several rows is drawn once
    for index, (label, run) in enumerate(runs.items()):
        newest = run.metric("calibrated_ece_1")
        if newest is None:
            continue
        found = {entry.name: entry for entry in run.results.metrics if entry.setting == newest.setting}
        for name, dash in (("confidence_ece", "dot"), ("calibrated_ece", "solid")):
            entries = [found[f"{name}_{k}"] for k in range(1, 1 + len(found)) if f"{name}_{k}" in found]
            style = line_style(index)
            style["line"] = style["line"] | {"dash": dash}
            figure.add_scatter(
                x=list(range(1, 1 + len(entries))),
                y=[entry.value for entry in entries],
                error_y=_error(entries),
                name=f"{label}, {'before' if dash == 'dot' else 'after'}",
                mode="lines+markers",
                hovertemplate="position %{x}: %{y:.3f}<extra>" + label + "</extra>",
                **style,
            )
    figure.update_yaxes(rangemode="tozero", tickformat=".0%")
    figure.update_xaxes(dtick=1)
    return figure if figure.data else None


def blank_figure(x: str, y: str) -> go.Figure:
    figure = go.Figure()
    axis = {"gridcolor": GRID, "zeroline": False, "automargin": True, "linecolor": "#8b97a4", "showline": True}
    figure.update_layout(
        template="none",
        font={"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13, "color": INK},
        paper_bgcolor="white",
        plot_bgcolor="white",
        margin={"l": 12, "r": 16, "t": 12, "b": 12},
        height=330,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        xaxis={**axis, "title": {"text": x, "standoff": 8, "font": {"size": 13}}},
        yaxis={**axis, "title": {"text": y, "standoff": 8, "font": {"size": 13}}},
        hoverlabel={"bgcolor": "white", "font": {"color": INK}},
    )
    return figure


def line_style(index: int) -> dict[str, dict]:
    colour = COLOURS[index % len(COLOURS)]
    return {
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "symbol": MARKERS[index % len(MARKERS)], "size": 8},
    }


def _error(entries) -> dict[str, object]:
    pairs = [
        (None, None) if entry.low is None else (entry.high - entry.value, entry.value - entry.low) for entry in entries
    ]
    return {
        "type": "data",
        "array": [up for up, _ in pairs],
        "arrayminus": [down for _, down in pairs],
        "thickness": 1.5,
    }


def _wrap(label: str) -> str:
    return label.replace(" (", "<br>(").replace(", ", ",<br>")
