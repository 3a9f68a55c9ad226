"""The way through: prompts -> regenerate -> capture -> train -> evaluate -> export -> serve -> report.

The only package that knows the Hydra config and builds objects from it.
"""

import logging
import shlex
import time
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import transformers
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dspark_lab.cluster.decision import needs_job
from dspark_lab.cluster.services import ServiceError
from dspark_lab.pipeline.combinations import settle_source
from dspark_lab.pipeline.distributed import count_ranks, take_part
from dspark_lab.pipeline.export import refuse_unwritable
from dspark_lab.pipeline.forecast import forecast
from dspark_lab.pipeline.here import before_job
from dspark_lab.pipeline.logged import logged
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.published import require_what_was_published
from dspark_lab.pipeline.rehearsal import replaced, table_of
from dspark_lab.pipeline.report import READERS
from dspark_lab.pipeline.serve import refuse_unservable
from dspark_lab.pipeline.slurm import hand_over, write_job
from dspark_lab.pipeline.stages import STAGES
from dspark_lab.pipeline.sweep import as_job, in_sweep, job_overrides, sharing
from dspark_lab.progress import console
from dspark_lab.report.results import RunInfo, StageRecord, update_results
from dspark_lab.run import name_run, open_run
from dspark_lab.signals import die_with_parent, handled, leave
from dspark_lab.training.place import Place


def run(config: DictConfig) -> float | None:
    """Carry out ``config.stages`` in order; returns the acceptance length (for sweepers), if it was evaluated."""
    quieten()
    stages = requested_stages(config.stages)
    if config.report.runs and all(stage in READERS for stage in stages):
        for stage in stages:
            READERS[stage](config, None)
        return None
    settle_source(config, HydraConfig.get().runtime.choices)
    resolved = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    name, info = identify(config, resolved)
    if config.sweep.dry:
        forecast(config, info, stages)
        return None
    carry = partial(carry_out_run, config, info, stages)
    if not in_sweep():
        return carry()
    return as_job(resolved, run_name=name, stages=stages, order=list(STAGES), carry_out=carry)


def identify(config: DictConfig, resolved: dict[str, Any]) -> tuple[str, RunInfo]:
    """The run that this config belongs to."""
    choices = {str(group): str(choice) for group, choice in HydraConfig.get().runtime.choices.items()}
    experiment = "-".join(choices[group] for group in ("experiment", "rehearse") if group in choices) or None
    name, config_hash = name_run(
        resolved, experiment=experiment, drafter=choices["drafter"], num_ranks=count_ranks(config)
    )
    return config.run.name or name, RunInfo(
        name=config.run.name or name,
        choices={group: choice for group, choice in choices.items() if not group.startswith(("hydra/", "sweep"))},
        config=resolved,
        config_hash=config_hash,
        command=shlex.join(["python", "-m", "dspark_lab", *job_overrides()]),
        seed=config.seed,
    )


def carry_out_run(config: DictConfig, info: RunInfo, stages: Sequence[str]) -> float | None:
    """In the run's folder, which is this process's meanwhile; or as a rank of the training that another one started."""
    place = settle(stages, config)
    L.seed_everything(config.seed, workers=True, verbose=False)
    with (
        handled(leave),
        open_run(
            Path(config.run.root),
            name=info.name,
            config_hash=info.config_hash,
            fresh=config.run.fresh and place.leads,
            lock=place.leads,
            wait=in_sweep(),
        ) as opened,
        closing(Parts(config, opened, info, place)) as parts,
    ):
        if not place.leads:
            if stages == ["doctor"]:  # of a further machine
                STAGES["doctor"](parts)
                return None
            return take_part(parts, STAGES["train"])
        if not needs_job(stages, cluster=info.choices["cluster"]):
            with logged(parts):
                return carry_out(stages, parts)
        script = write_job(parts, before_job(parts, stages))
    hand_over(script, submits=config.cluster.submit)
    return None


def settle(stages: Sequence[str], config: DictConfig) -> Place:
    """Find this process's place in a training group, and be silent in all but the first.

    The tasks of a step that does stages=doctor alone are no group: each looks at its own machine, and tells.

    Raises:
        ValueError: a group is asked for what only one process may do.
    """
    place = Place.of()
    if stages == ["doctor"] and place.group_folder is None:
        return replace(place, num_ranks=1)
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
        refuse_unwritable(parts.config)
    if "serve" in stages and not parts.export.force:
        refuse_unservable(parts)
    if parts.config.about:
        console.print(parts.config.about)
    if parts.published is not None:
        require_what_was_published(parts)
    if "rehearse" in parts.info.choices:
        hydra = HydraConfig.get()
        console.print(table_of(replaced(str(hydra.job.config_name), list(hydra.overrides.task))))
    console.print(f"[bold]{parts.run.name}[/bold]: {' -> '.join(stages)} in {parts.run.directory}")
    OmegaConf.save(parts.config, parts.run.directory / "config.yaml", resolve=True)
    acceptance = None
    for stage in stages:
        started = time.monotonic()
        try:
            with sharing(parts, stage):
                record, metrics = STAGES[stage](parts)
        except Exception as error:
            failed = StageRecord(stage, time.monotonic() - started, error=str(error) or repr(error))
            update_results(parts.run.directory, run=parts.info, stage=failed)
            raise
        done = StageRecord(stage, **{"time_s": time.monotonic() - started, **record})
        update_results(parts.run.directory, run=parts.info, stage=done, metrics=metrics)
        if done.error:  # something failed in it, which takes nothing of the rest with it
            raise ServiceError(f"{done.error}\nWhat {stage} has found out all the same is in {parts.run.directory}")
        if stage == "evaluate":
            acceptance = next((entry.value for entry in metrics if entry.name == "acceptance_length"), None)
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
    warnings.filterwarnings("ignore", message="The `srun` command is available")  # who needs it is started with it
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")  # never written into
    warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty")  # a resumed run
