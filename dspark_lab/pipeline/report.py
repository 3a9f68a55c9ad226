"""Stage *report*: the comparison of runs."""

from collections.abc import Callable, Mapping
from pathlib import Path

from omegaconf import DictConfig

from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.parts import Parts
from dspark_lab.progress import console
from dspark_lab.report.html import write_report
from dspark_lab.run import Run


def report(parts: Parts) -> Outcome:
    """The comparison of ``report.runs``, or this run alone."""
    compare(parts.config, parts.run)
    return {}, []


def compare(config: DictConfig, opened: Run | None = None) -> None:
    """Print and write the comparison of ``report.runs`` (or of the run at hand) into ``report.out`` (or its folder)."""
    runs = [Path(entry) for entry in config.report.runs] or ([opened.directory] if opened else [])
    out = Path(config.report.out) if config.report.out else (opened.directory if opened else Path(config.run.root))
    path = write_report(runs, out, title=opened.name if opened else "Comparison of drafters", console=console)
    if config.expect:
        console.print(config.expect)
    console.print(f"report: {path}")


READERS: Mapping[str, Callable[[DictConfig, Run | None], None]] = {"report": compare}
"""Stages that only read runs, and need none of their own where ``report.runs`` names some."""
