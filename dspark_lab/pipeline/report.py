"""The stages that only read runs: *recompute*, *collect*, *report* and *show*."""

from collections.abc import Callable, Mapping
from pathlib import Path

from omegaconf import DictConfig

from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.parts import Parts
from dspark_lab.progress import console
from dspark_lab.report.collect import collect as collect_runs
from dspark_lab.report.html import write_report
from dspark_lab.report.recompute import recompute as recompute_run
from dspark_lab.report.show import show_examples
from dspark_lab.report.tidy import tidy_rows, wandb_group_rows, wandb_rows, write_table
from dspark_lab.report.wandb_report import Place, publish
from dspark_lab.run import Run

Reader = Callable[[DictConfig, Run | None], None]


def compare(config: DictConfig, opened: Run | None) -> None:
    """Print and write the comparison into ``report.out`` (or the run's folder); to W&B too with ``report.wandb``."""
    title = config.report.title or (opened.name if opened else "Comparison of drafters")
    path = write_report(
        _runs(config, opened),
        _out(config, opened),
        title=title,
        question=config.report.question,
        console=console,
    )
    if config.expect:
        console.print(config.expect)
    console.print(f"report: {path}")
    if config.report.wandb:
        place = _wandb_place(config)
        collection = collect_runs(_runs(config, opened))
        url = publish(collection, place, title=title, question=config.report.question, folder=path.parent)
        console.print(f"W&B report: {url}")


def tabulate(config: DictConfig, opened: Run | None) -> None:
    """Every number of the runs, and of ``report.wandb_runs`` and ``wandb_groups``, as one tidy table: ``report.table``."""
    rows = tidy_rows(collect_runs(_runs(config, opened)))
    rows += wandb_rows([Path(entry) for entry in config.report.wandb_runs])
    rows += [row for group in config.report.wandb_groups for row in wandb_group_rows(group)]
    out = _out(config, opened)
    path = write_table(rows, (out.parent if out.suffix else out) / config.report.table)
    console.print(f"collect: {len(rows)} numbers in {path}")


def verify(config: DictConfig, opened: Run | None) -> None:
    """Every headline number anew from the raw traces.

    Raises:
        ValueError: one does not come out the same.
    """
    found = [recompute_run(run) for run in collect_runs(_runs(config, opened)).runs]
    for entry in found:
        console.print(f"recompute: {entry.run}: {len(entry.equal)} numbers came out the same")
    different = [f"{entry.run}: {told}" for entry in found for told in entry.different]
    if different:
        raise ValueError("recompute: " + "; ".join(different))


def show(config: DictConfig, opened: Run | None) -> None:
    """What was drafted for a few prompts."""
    show_examples(collect_runs(_runs(config, opened)), console)


READERS: Mapping[str, Reader] = {"recompute": verify, "collect": tabulate, "report": compare, "show": show}
"""They need no run of their own where ``report.runs`` names some."""


def reading(name: str) -> Callable[[Parts], Outcome]:
    """The reader as a stage of a run, of which it reads by default."""

    def stage(parts: Parts) -> Outcome:
        READERS[name](parts.config, parts.run)
        return {}, []

    return stage


def _wandb_place(config: DictConfig) -> Place:
    project, entity = config.logger.get("project"), config.logger.get("entity")
    if not project or not entity:
        raise ValueError(
            "report.wandb=true needs logger=wandb with logger.entity=<W&B user or team>: the report is of the runs there"
        )
    return Place(project, entity)


def _runs(config: DictConfig, opened: Run | None) -> list[Path]:
    return [Path(entry) for entry in config.report.runs] or ([opened.directory] if opened else [])


def _out(config: DictConfig, opened: Run | None) -> Path:
    if config.report.out:
        return Path(config.report.out)
    return opened.directory if opened else Path(config.run.root)
