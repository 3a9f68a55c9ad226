"""Charts of serving: simulated frontiers, and what an engine did with the simulation of the same beside it."""

from collections.abc import Sequence

import plotly.graph_objects as go

from dspark_lab.report.charts import MARKERS, blank_figure, line_style
from dspark_lab.report.predicted import scheme_of
from dspark_lab.report.served import ServedPoint
from dspark_lab.serving.frontier_file import FrontierFile


def frontier_chart(frontier: FrontierFile) -> go.Figure:
    """Simulated output throughput over interactivity, a line a scheme; a point a load, hollow off the frontier."""
    figure = blank_figure("simulated tokens/s per user", "simulated output tokens/s per GPU")
    for index, curve in enumerate(frontier.curves):
        shown = [record for record in curve.points if record.point]
        points = [record.point for record in shown if record.point]
        style = line_style(index)
        symbol = MARKERS[index % len(MARKERS)]
        symbols = [symbol if record.on_frontier else f"{symbol}-open" for record in shown]
        style["marker"] = style["marker"] | {"symbol": symbols}
        figure.add_scatter(
            x=[point.interactivity for point in points],
            y=[point.throughput for point in points],
            customdata=[
                f"load {record.load:g}, {record.num_gpus} GPUs"
                + (f"<br>{record.extrapolated}" if record.extrapolated else "")
                for record in shown
            ],
            name=curve.scheme,
            mode="lines+markers",
            hovertemplate="%{x:.1f} tokens/s/user, %{y:.1f} tokens/s/GPU<br>%{customdata}<extra>"
            + curve.scheme
            + "</extra>",
            **style,
        )
    figure.update_layout(height=420)
    return figure


def served_chart(points: Sequence[ServedPoint], frontier: FrontierFile | None = None) -> go.Figure | None:
    """Measured output throughput over interactivity, a line a number of draft tokens, a point a concurrency.

    ``frontier``: a simulation of the same, dotted and hollow. None where neither has two points with a speed.
    """
    known = [point for point in points if point.tokens_per_s is not None and point.tokens_per_s_per_user is not None]
    figure, drawn = blank_figure("tokens/s per user", "output tokens/s of the engine"), 0
    for index, (scheme, simulated) in enumerate({point.scheme: scheme_of(point) for point in points}.items()):
        shown = [point for point in known if point.scheme == scheme]
        style = line_style(index)
        if shown:
            figure.add_scatter(
                x=[point.tokens_per_s_per_user for point in shown],
                y=[point.tokens_per_s for point in shown],
                text=[str(point) for point in shown],
                name=scheme if frontier is None else f"{scheme}, measured",
                mode="lines+markers",
                hovertemplate="%{text}<extra></extra>",
                **style,
            )
        records = [] if frontier is None else frontier.points_of(simulated)
        if records:
            style["line"] |= {"dash": "dot"}
            style["marker"] |= {"symbol": f"{MARKERS[index % len(MARKERS)]}-open"}
            figure.add_scatter(
                x=[record.metrics["tokens_per_s_per_user"] for record in records],
                y=[record.metrics["output_tokens_per_s"] for record in records],
                text=[f"{scheme}, concurrency {record.load:g}, simulated" for record in records],
                name=f"{scheme}, simulated",
                mode="lines+markers",
                hovertemplate="%{text}: %{x:.1f} tokens/s per user, %{y:.1f} tokens/s<extra></extra>",
                **style,
            )
        drawn += len(shown) + len(records)
    figure.update_layout(height=420)
    return figure if drawn > 1 else None
