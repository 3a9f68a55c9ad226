"""The way through: prompts -> regenerate -> capture -> train -> evaluate -> export -> serve -> report.

The only package that knows the Hydra config and builds objects from it.
"""

import logging
import shlex
import time
import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from dspark_lab.checkpoint.description import format_of
from dspark_lab.pipeline.distributed import count_ranks, take_part
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.report import compare
from dspark_lab.pipeline.serve import refuse_unservable
from dspark_lab.pipeline.stages import STAGES
from dspark_lab.progress import console
from dspark_lab.report.results import RunInfo, StageRecord, update_results
from dspark_lab.run import name_run, open_run
from dspark_lab.signals import die_with_parent, handled, leave
from dspark_lab.training.place import Place


def run(config: DictConfig) -> float | None:
    """Carry out ``config.stages`` in order; returns the acceptance length (for sweepers), if it was evaluated."""
    quieten()
    stages = requested_stages(config.stages)
    if stages == ["report"] and config.report.runs:
        compare(config)
        return None
    resolved = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    choices = {str(group): str(choice) for group, choice in HydraConfig.get().runtime.choices.items()}
    name, config_hash = name_run(
        resolved, experiment=choices.get("experiment"), drafter=choices["drafter"], num_ranks=count_ranks(config)
    )
    place = settle(stages, config)
    L.seed_everything(config.seed, workers=True, verbose=False)
    with (
        handled(leave),
        open_run(
            Path(config.run.root),
            name=config.run.name or name,
            config_hash=config_hash,
            fresh=config.run.fresh,
            lock=place.leads,
        ) as opened,
    ):
        info = RunInfo(
            name=opened.name,
            choices={group: choice for group, choice in choices.items() if not group.startswith("hydra/")},
            config=resolved,
            config_hash=config_hash,
            command=shlex.join(["python", "-m", "dspark_lab", *HydraConfig.get().overrides.task]),
            seed=config.seed,
        )
        with closing(Parts(config, opened, info, place)) as parts:
            return carry_out(stages, parts) if place.leads else take_part(parts, STAGES["train"])


def settle(stages: Sequence[str], config: DictConfig) -> Place:
    """Find this process's place in a training group, and be silent in all but the first.

    Raises:
        ValueError: a group is asked for what only one process may do.
    """
    place = Place.of()
    if place.num_ranks > 1 and (stages != ["train"] or config.run.fresh):
        raise ValueError(
            f"this process is rank {place.rank} of {place.num_ranks}; a group only does stages=train, without run.fresh "
            f"(here: stages={list(stages)}, run.fresh={config.run.fresh}): do the rest in one process"
        )
    if place.group_folder is not None:
        die_with_parent()
    if place.num_ranks > 1 and torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank)  # else every rank would first put the target's matrices on GPU 0
    console.quiet = place.rank > 0
    return place


def carry_out(stages: Sequence[str], parts: Parts) -> float | None:
    """Stage after stage; each leaves its record and metrics in ``results.json``, a failing one its error."""
    # Not after hours of training.
    if "export" in stages:
        format_of(get_class(parts.config.drafter._target_))
    if "serve" in stages and not parts.export.force:
        refuse_unservable(parts)
    if parts.config.about:
        console.print(parts.config.about)
    console.print(f"[bold]{parts.run.name}[/bold]: {' -> '.join(stages)} in {parts.run.directory}")
    OmegaConf.save(parts.config, parts.run.directory / "config.yaml", resolve=True)
    acceptance = None
    for stage in stages:
        started = time.monotonic()
        try:
            record, metrics = STAGES[stage](parts)
        except Exception as error:
            failed = StageRecord(stage, time.monotonic() - started, error=str(error) or repr(error))
            update_results(parts.run.directory, run=parts.info, stage=failed)
            raise
        record = {"time_s": time.monotonic() - started, **record}
        update_results(parts.run.directory, run=parts.info, stage=StageRecord(stage, **record), metrics=metrics)
        if stage == "evaluate":
            acceptance = next(entry.value for entry in metrics if entry.name == "acceptance_length")
    return acceptance


def requested_stages(stages: Any) -> list[str]:
    """One name or a list, in the order of the way through. ValueError for a name that is no stage."""
    names = [stages] if isinstance(stages, str) else list(stages)
    unknown = [name for name in names if name not in STAGES]
    if unknown or not names:
        raise ValueError(f"stages={names}: choose from {', '.join(STAGES)}; several as 'stages=[evaluate,report]'")
    return [name for name in STAGES if name in names]


def quieten() -> None:
    """Advertisements, second progress bars and known noise of the libraries; their warnings stay."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)  # Lightning 2.6 on torch 2.13
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")  # never written into
    warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty")  # a resumed run
