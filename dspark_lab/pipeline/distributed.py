"""Training as a group of processes: all other stages run once, in the pipeline's own process (design, law 9)."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.sweep import job_overrides
from dspark_lab.progress import console
from dspark_lab.records import Metric
from dspark_lab.training.launch import launch
from dspark_lab.training.place import num_devices

Outcome = tuple[dict[str, Any], list[Metric]]

OUTCOME_FILE = "outcome.json"


def count_ranks(config: DictConfig) -> int:
    """Ranks that ``trainer`` asks for. Raises ValueError for what is no number."""
    for name in ("devices", "num_nodes"):
        value = config.trainer[name]
        if not (isinstance(value, int) and value >= 1) and (name, value) != ("devices", "auto"):
            raise ValueError(
                f"trainer.{name}={value!r} must be a number of at least 1" + ", or auto" * (name == "devices")
            )
    return num_devices(config.trainer.devices, config.trainer.accelerator) * config.trainer.num_nodes


def must_launch(parts: Parts) -> bool:
    """Whether training needs ranks that do not run yet.

    Raises:
        ValueError: the group that this process is in, or could start, is not the one that ``trainer`` asks for.
    """
    wanted, present = count_ranks(parts.config), parts.place.num_ranks
    if present not in (1, wanted):
        raise ValueError(
            f"this process is one of {present} ranks, but trainer.devices x trainer.num_nodes asks for {wanted}: "
            "make them equal"
        )
    if present == wanted:
        return False
    if parts.config.trainer.num_nodes > 1:
        raise ValueError(
            f"trainer.num_nodes={parts.config.trainer.num_nodes}: cluster=slurm starts ranks on other machines; elsewhere "
            "they have to be started with torchrun, as `... -m dspark_lab <the same overrides> stages=train`"
        )
    if parts.info.choices["store"] == "memory":
        raise ValueError(f"store=memory is seen by one process only, and training needs {wanted}: use store=disk")
    return True


def train_as_group(parts: Parts) -> Outcome:
    """Start ``stages=train`` of this same run on every device, wait, and take rank 0's outcome."""
    folder = parts.run.directory / "ranks"
    outcome = folder / OUTCOME_FILE
    outcome.unlink(missing_ok=True)
    parts.release()
    live = parts.corpus.source == "live"
    if live:
        _ = parts.source  # before the ranks put anything: it removes what earlier starts left
    num_ranks = count_ranks(parts.config)
    console.print(f"train: {num_ranks} ranks, logs in {folder}")
    launch(
        rank_command(parts),
        num_ranks=num_ranks,
        folder=folder,
        environment=parts.cluster.training_environment if live else {},
    )
    parts.end_capture()
    said = json.loads(outcome.read_text())
    return said["record"], [Metric(**entry) for entry in said["metrics"]]


def take_part(parts: Parts, train: Callable[[Parts], Outcome]) -> None:
    """As a rank whose results another process writes."""
    record, metrics = train(parts)
    if parts.place.rank == 0:
        assert parts.place.group_folder is not None
        said = {"record": record, "metrics": [asdict(entry) for entry in metrics]}
        (parts.place.group_folder / OUTCOME_FILE).write_text(json.dumps(said))


def rank_command(parts: Parts) -> list[str]:
    """Of a rank of this very run."""
    return [*(sys.executable, "-m", "dspark_lab"), *job_arguments(parts), "stages=train", *joined_services(parts)]


def job_arguments(parts: Parts) -> list[str]:
    """This job's own overrides, then those that lead another process to this very run."""
    hydra = HydraConfig.get()
    folders = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    return [
        *(f"--config-dir={folder}" for folder in folders),
        *job_overrides(),
        f"home={_quoted(parts.home.absolute())}",
        f"run.root={_quoted(parts.run.directory.parent.absolute())}",
        f"run.name={_quoted(parts.run.directory.name)}",
        "run.fresh=false",
    ]


def joined_services(parts: Parts) -> list[str]:
    """Overrides with which a rank uses this process's services and generation instead of starting its own."""
    if parts.info.choices["store"] != "mooncake":
        return []
    mooncake = parts.cluster.mooncake()
    joined = [
        f"store.generation={parts.generation}",
        f"cluster.mooncake.master_address={mooncake.master_address}",
        f"cluster.mooncake.admin_url={mooncake.admin_url}",
    ]
    if parts.corpus.source == "live" and parts.info.choices["cluster"] == "local":
        joined.append(f"engine.endpoints=[{','.join(parts.source_urls)}]")
    return joined


def _quoted(value: Path | str) -> str:
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
