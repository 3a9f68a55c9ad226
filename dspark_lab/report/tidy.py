"""One tidy table of any runs: a line a number, with the run, the choices, what differs, and the number's own setting."""

import csv
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_lab.report.collect import Collection, flatten
from dspark_lab.report.comparison import differing_settings
from dspark_lab.report.vocabulary import ORIGINS, metric_kind

WANDB_TIMEOUT_S = 30
FIRST = (
    "run",
    "source",
    "drafter",
    "target",
    "seed",
    "metric",
    "value",
    "unit",
    "origin",
    "low",
    "high",
    "num_samples",
)


def tidy_rows(collection: Collection) -> list[dict[str, Any]]:
    """``config.<key>`` for each key in which the runs differ, ``setting.<key>`` for what the number depends on."""
    unlike = differing_settings(collection.runs)
    rows = []
    for run in collection.runs:
        info = run.results.run
        config = flatten(info.config)
        common = {
            "run": info.name,
            "source": str(run.directory),
            "drafter": run.drafter,
            "target": info.choices.get("target"),
            "seed": info.seed,
        }
        choices = {f"config.{key}": _plain(config.get(key)) for key in unlike}
        for entry in run.results.metrics:
            number = {"metric": entry.name, "value": entry.value, "unit": entry.unit, "origin": entry.origin}
            number |= {"low": entry.low, "high": entry.high, "num_samples": entry.num_samples}
            settings = {f"setting.{key}": _plain(value) for key, value in entry.setting.items()}
            rows.append(common | number | choices | settings)
    return rows


def wandb_rows(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The summaries of offline W&B runs (``run-*.wandb`` or folders that hold them), in the same columns.

    Raises:
        ValueError: nothing there, W&B is not installed, or it cannot read a file.
    """
    rows = []
    for file in _wandb_files(files):
        found = read_offline_run(file)
        name = found.get("name") or file.stem.removeprefix("run-")
        rows += _summary_rows(name, str(file), found.get("config", {}), found.get("summary", {}))
    return rows


def wandb_group_rows(group: str) -> list[dict[str, Any]]:
    """The summaries of the runs that a W&B server has of ``group``, "entity/project/group", in the same columns.

    Raises:
        ValueError: another form, W&B is not installed, no such runs, or the server does not answer or does not let us in.
    """
    project, _, name = group.rpartition("/")
    if project.count("/") != 1 or not all(group.split("/")):
        raise ValueError(f"report.wandb_groups: {group!r}: name it as entity/project/group")
    try:
        import wandb
        from wandb.errors import Error
    except ImportError as error:
        raise ValueError(f'report.wandb_groups={group}: pip install "dspark_lab[wandb]"') from error
    try:
        # Not lazy: config and summary come with the list, instead of a request for each run.
        runs = list(wandb.Api(timeout=WANDB_TIMEOUT_S).runs(project, filters={"group": name}, lazy=False))
    except (Error, ValueError) as error:
        raise ValueError(
            f"report.wandb_groups={group}: {error}. Is WANDB_API_KEY set, and WANDB_BASE_URL the server's?"
        ) from error
    if not runs:
        raise ValueError(f"report.wandb_groups={group}: {project} has no run in the group {name!r}")
    return [row for run in runs for row in _summary_rows(run.name, run.url, run.config, dict(run.summary))]


def read_offline_run(file: Path) -> dict[str, Any]:
    """What ``wandb leet inspect --json`` says of one file."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{file}: `wandb leet inspect` cannot read it: {(done.stderr or done.stdout).strip()[-500:]}")
    return json.loads(done.stdout)


def write_table(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """CSV, or Parquet where ``path`` ends so (needs pyarrow, which the extra ``datasets`` brings).

    Raises:
        ValueError: another suffix, or pyarrow is missing.
    """
    names = list(dict.fromkeys([*FIRST, *sorted({name for row in rows for name in row})]))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ValueError(
                f'{path}: Parquet needs pyarrow: pip install "dspark_lab[datasets]", or name a .csv'
            ) from error
        columns = {name: [row.get(name) for row in rows] for name in names}
        parquet.write_table(pyarrow.table({name: _one_kind(values) for name, values in columns.items()}), path)
    else:
        raise ValueError(f"report.table={path}: end it with .csv or .parquet")
    return path


def _one_kind(values: list[Any]) -> list[Any]:
    """Parquet columns hold values of one kind: numbers stay numbers, mixtures become text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        return [None if value is None else float(value) for value in values] if float in kinds else values
    return values if len(kinds) <= 1 else [None if value is None else str(value) for value in values]


def _summary_rows(run: str, source: str, config: Mapping[str, Any], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    common = {
        "run": run,
        "source": source,
        "drafter": _value(config, "drafter_name"),
        "target": _value(config, "target_name"),
        "seed": _value(config, "seed"),
    }
    rows = []
    for key, value in summary.items():  # tables and media are mappings
        if isinstance(value, int | float) and not key.startswith("_"):
            name, _, origin = key.rpartition("/")
            if origin not in ORIGINS:
                name, origin = key, None  # a curve's last point
            rows.append(common | {"metric": name, "value": value, "unit": _unit(name), "origin": origin})
    return rows


def _wandb_files(entries: Sequence[Path]) -> list[Path]:
    found = []
    for entry in entries:
        files = [entry] if entry.suffix == ".wandb" else sorted(entry.rglob("*.wandb"))
        if not files or not all(file.is_file() for file in files):
            raise ValueError(f"report.wandb_runs: {entry} holds no offline W&B run (*.wandb)")
        found += files
    return found


def _value(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    return value["value"] if isinstance(value, Mapping) and "value" in value else value


def _unit(name: str) -> str | None:
    try:
        return metric_kind(name).unit
    except ValueError:
        return None


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float | bool) else json.dumps(value, default=str)
