"""What race.py measured: acceptance over CPU time and over tokens, a column for each drafter.

python experiments/training_step/race_figure.py experiments/training_step/race.jsonl experiments/training_step/race.svg
"""

import argparse
import json
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from dspark_lab.report.charts import COLOURS

AXES = {"cpu_s": "CPU seconds of training", "tokens": "training tokens"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="the .jsonl of race.py")
    parser.add_argument("out", type=Path, help="an .svg")
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.measured.read_text().splitlines()]
    drafters = sorted({line["drafter"] for line in lines})
    labels = sorted({line["label"] for line in lines}, key=lambda label: (not label.startswith("Spec"), label))
    colours = dict(zip(labels, COLOURS, strict=False))
    plt.rcParams |= {"svg.hashsalt": "dspark_lab", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    figure, axes = plt.subplots(len(AXES), len(drafters), figsize=(4 * len(drafters), 6), sharey=True, squeeze=False)
    for name, (drafter, label, seed) in ((key, found) for key in AXES for found in curves(lines)):
        points = [line for line in lines if (line["drafter"], line["label"], line["seed"]) == (drafter, label, seed)]
        axis = axes[list(AXES).index(name), drafters.index(drafter)]
        places, values = ([point[key] for point in points] for key in (name, "estimate"))
        axis.plot(places, values, color=colours[label], label=label if name == "cpu_s" else None, linewidth=1.2)
        axis.set_xlabel(AXES[name])
        if name == "tokens":
            axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:,.0f}k")
        axis.set_title(drafter)
        axis.grid(alpha=0.25)
    for row in axes:
        row[0].set_ylabel("acceptance length, estimated")
    handles = {label: Line2D([], [], color=colour) for label, colour in colours.items()}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(given.out, metadata={"Date": None})


def curves(lines: list[dict]) -> list[tuple[str, str, int]]:
    return [key for key, _ in groupby(lines, key=lambda line: (line["drafter"], line["label"], line["seed"]))]


if __name__ == "__main__":
    main()
