"""The figure of a study: acceptance while training, and by draft position at its end, one colour an algorithm.

python experiments/figure.py runs/drafters experiments/drafters/figure.svg [--compute]
"""

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from dspark_lab.report.algorithms import algorithm_rows
from dspark_lab.report.charts import COLOURS
from dspark_lab.report.collect import RunResult, collect
from dspark_lab.report.comparison import Row

CURVE = "val/acceptance_length_estimate"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders, folders of runs, or patterns of either")
    parser.add_argument("out", type=Path, help="an .svg")
    parser.add_argument("--compute", action="store_true", help="a panel over training FLOPs too")
    given = parser.parse_args()
    rows = sorted(algorithm_rows(collect(given.runs)), key=lambda row: row.label)
    plt.rcParams |= {"svg.hashsalt": "dspark_lab", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    figure, axes = plt.subplots(1, 3 if given.compute else 2, figsize=(13.5 if given.compute else 9.5, 3.8))
    draw_curves(axes[0], rows, compute=False)
    if given.compute:
        draw_curves(axes[1], rows, compute=True)
    draw_positions(axes[-1], rows)
    columns = max(1, min(3, 120 // max(len(row.label) for row in rows)))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=columns, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.96 - 0.05 * -(-len(rows) // columns)))
    figure.savefig(given.out, metadata={"Date": None})


def draw_curves(axis: Axes, rows: list[Row], *, compute: bool) -> None:
    """Thin: a seed; thick: the mean over seeds."""
    for colour, row in zip(COLOURS * 2, rows, strict=False):
        points = defaultdict(list)
        for run in row.runs or (row.run,):
            curve = run.curve(CURVE)
            if curve is None:
                raise ValueError(
                    f"{run.directory} has no {CURVE}: train it with trainer.val_every_steps below its steps"
                )
            places = np.array(curve.tokens) * (flops_per_token(run) if compute else 1)
            axis.plot(places, curve.value, color=colour, linewidth=0.5, alpha=0.5)
            for step, point in zip(curve.step, zip(places, curve.value, strict=True), strict=True):
                points[step].append(point)
        means = np.array([np.mean(found, axis=0) for found in points.values()])
        axis.plot(means[:, 0], means[:, 1], color=colour, linewidth=1.8, label=row.label)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("training FLOPs" if compute else "training tokens")
    axis.set_ylabel("acceptance length, estimated (tokens/step)")
    axis.grid(alpha=0.25)
    if compute:
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:.1e}")
    else:
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:,.0f}k")


def draw_positions(axis: Axes, rows: list[Row]) -> None:
    for colour, row in zip(COLOURS * 2, rows, strict=False):
        rates = [np.nan if entry.value is None else entry.value for entry in row.conditional_rates]
        axis.plot(range(1, len(rates) + 1), rates, marker="o", markersize=3, color=colour)
    axis.set_xlabel("draft position")
    axis.set_ylabel("acceptance rate, given the prefix (replayed)")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.25)


def flops_per_token(run: RunResult) -> float:
    flops, tokens = (run.metric(name) for name in ("train_flops", "num_train_tokens"))
    if flops is None or tokens is None or not flops.value or not tokens.value:
        raise ValueError(f"{run.directory} has no train_flops: train it again, or leave out --compute")
    return flops.value / tokens.value


if __name__ == "__main__":
    main()
