"""The comparison as a W&B report (reports v2): the headline table, and panels over the runs' groups."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_lab.report.collect import Collection
from dspark_lab.report.comparison import differing_settings
from dspark_lab.report.text import markdown

ID_FILE = "wandb_report.json"
TITLE_LENGTH = 128
ACCEPTANCE = "acceptance_length/measured"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the report goes. ``entity`` is a W&B user or team."""

    project: str
    entity: str


def publish(collection: Collection, place: Place, *, title: str, question: str | None, folder: Path) -> str:
    """Save it and return its address. ``<folder>/wandb_report.json`` keeps its id: the next time it is updated.

    Raises:
        ValueError: the extra is not installed, or W&B refuses.
    """
    try:
        import wandb
        from wandb_workspaces.reports import v2
    except ModuleNotFoundError as error:
        raise ValueError('report.wandb=true needs W&B: pip install "dspark_lab[wandb]"') from error
    reports: Any = v2  # it exports its names in a way that type checkers do not see
    known = folder / ID_FILE
    report = reports.Report(
        project=place.project,
        entity=place.entity,
        title=title[:TITLE_LENGTH],
        description=question or "",
        blocks=_blocks(reports, collection, place, question),
    )
    if known.exists():
        report.id = json.loads(known.read_text(encoding="utf-8"))["id"]
    try:
        report.save()
    except (wandb.Error, OSError) as error:
        raise ValueError(f"report.wandb=true: W&B did not take the report ({error}): is WANDB_API_KEY set?") from error
    known.write_text(json.dumps({"id": report.id, "url": report.url}, indent=1) + "\n", encoding="utf-8")
    return report.url


def _blocks(reports: Any, collection: Collection, place: Place, question: str | None) -> list[Any]:
    groups = sorted({run.results.run.choices.get("experiment", "run") for run in collection.runs})
    axes = sweep_axes(collection)
    runsets = [
        reports.Runset(
            entity=place.entity, project=place.project, name=group, filters=f"Group = '{group}'", groupby=axes
        )
        for group in groups
    ]
    asked = [reports.P(question)] if question else []
    return [
        *asked,
        reports.MarkdownBlock(text=markdown(collection)),
        reports.PanelGrid(runsets=runsets, panels=_panels(reports, axes)),
    ]


def _panels(reports: Any, axes: Sequence[str]) -> list[Any]:
    columns = [reports.ParallelCoordinatesPlotColumn(metric=name) for name in [*axes, f"summary:{ACCEPTANCE}"]]
    return [
        reports.LinePlot(title="validation acceptance over tokens", x="tokens", y=["val/acceptance_length"]),
        reports.LinePlot(title="training loss (objectives differ)", x="tokens", y=["train/loss"]),
        reports.BarPlot(title="acceptance length, real decoding", metrics=[ACCEPTANCE]),
        reports.ScatterPlot(
            title="frontier: acceptance against tokens trained on",
            x=reports.SummaryMetric("num_train_tokens/measured"),
            y=reports.SummaryMetric(ACCEPTANCE),
            running_ymax=True,
        ),
        reports.ParallelCoordinatesPlot(columns=columns),
        reports.RunComparer(diff_only="split"),
        reports.MediaBrowser(media_keys=["examples"]),
    ]


def sweep_axes(collection: Collection) -> list[str]:
    """At most three: the drafter where it differs, else the settings that do. Seeds are no axis."""
    if len({run.drafter for run in collection.runs}) > 1:
        return ["config.drafter_name"]
    differing = [key for key in differing_settings(collection.runs) if key != "seed" and not key.endswith(".seed")]
    return [f"config.{key}" for key in differing[:3]]
