"""A run that Slurm carries out: its job is written into the run's folder, submitted when asked, or run in an allocation."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hydra.core.hydra_config import HydraConfig

from dspark_lab.cluster.decision import Scheduler
from dspark_lab.cluster.slurm import Engine, SlurmJob, Work, submit
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.distributed import job_arguments
from dspark_lab.pipeline.parts import Parts
from dspark_lab.progress import console
from dspark_lab.target.resolve import loadable

SCRIPT = "job.sh"


def write_job(parts: Parts, stages: Sequence[str]) -> Path:
    """The batch script of ``stages``, in the run's folder; nothing is loaded.

    Raises:
        ValueError: something that only the nodes could tell, or that contradicts itself.
    """
    job: SlurmJob = build(parts.config, "cluster")
    work = work_of(parts, stages)
    if 0 < job.gpus_per_node < work.ranks_per_node:
        raise ValueError(
            f"trainer.devices={work.ranks_per_node} is more than cluster.gpus_per_node={job.gpus_per_node}"
        )
    script = parts.run.directory / SCRIPT
    (parts.run.directory / "logs").mkdir(exist_ok=True)
    script.write_text(job.render(work))
    script.chmod(0o755)
    return script.absolute()


def hand_over(script: Path, *, submits: bool, environment: Mapping[str, str] = os.environ) -> None:
    """Inside an allocation this process becomes the script; else it is submitted, or it is told how."""
    log = script.parent / "logs" / "job.log"
    if Scheduler.found(environment).num_nodes:
        run_here(script)
    if submits:
        job_id = submit(script)
        console.print(
            f"slurm: job {job_id} is submitted ({script})\nfollow it:  tail -F {log}\nend it:     scancel {job_id}",
            soft_wrap=True,
        )
        return
    command = shlex.join(["python", "-m", "dspark_lab", *HydraConfig.get().overrides.task, "cluster.submit=true"])
    console.print(
        f"slurm: the job is in {script}; nothing is submitted yet. This does it:\n{command}",
        soft_wrap=True,
        markup=False,
    )


def run_here(script: Path) -> NoReturn:
    sys.stdout.flush()
    os.execvp("bash", ["bash", str(script)])


def work_of(parts: Parts, stages: Sequence[str]) -> Work:
    """What ``stages`` ask of the job. Raises ValueError for what only the nodes could tell."""
    trainer, choices = parts.config.trainer, parts.info.choices
    if trainer.devices == "auto":
        raise ValueError("trainer.devices=auto: this machine does not know the nodes' GPUs; give their number")
    engine = engine_of(parts, stages)
    before = [stage for stage in stages if not (stage == "regenerate" and engine is not None)]
    after: list[str] = []
    if "train" in stages:
        position = before.index("train")
        before, after = before[:position], before[position + 1 :]
    return Work(
        name=parts.run.name,
        folder=parts.run.directory.absolute(),
        # The number of nodes too: an experiment may take it from a setting of the cluster, as ${cluster.num_sets}.
        arguments=(*without_cluster(job_arguments(parts)), f"trainer.num_nodes={trainer.num_nodes}"),
        before=tuple(before),
        train="train" in stages,
        after=tuple(after),
        num_nodes=trainer.num_nodes,
        ranks_per_node=trainer.devices,
        engine=engine,
        stores_in_mooncake=choices["store"] == "mooncake",
    )


def num_nodes_of(parts: Parts, stages: Sequence[str]) -> int:
    """Of the job that does ``stages``."""
    job: SlurmJob = build(parts.config, "cluster")
    engines = any(servers_of(parts, stages))
    return job.num_nodes(num_training_nodes=parts.config.trainer.num_nodes, engines=engines)


def servers_of(parts: Parts, stages: Sequence[str]) -> tuple[bool, bool]:
    """Whether the stages need servers that answer, and that capture."""
    if parts.info.choices["engine"] != "vllm":
        return False, False
    answers = "regenerate" in stages  # those to the benchmark at least
    return answers, "capture" in stages or (parts.corpus.source == "live" and "train" in stages)


def engine_of(parts: Parts, stages: Sequence[str]) -> Engine | None:
    """The servers that the stages need; None when they need none."""
    config = parts.config
    answers, captures = servers_of(parts, stages)
    if not (answers or captures):
        return None
    target = config.target
    if target.layer_ids is None or target.num_layers is None:
        raise ValueError("target.layer_ids and target.num_layers must be numbers: the engines are started with them")
    return Engine(
        model=loadable(
            target.model,
            home=parts.home,
            source=target.source,
            package=target.package,
            package_sha256=target.package_sha256,
        ),
        revision=target.revision,
        layer_ids=(*target.layer_ids, target.num_layers),
        dtype=config.engine.dtype,
        answers=answers,
        captures=captures,
    )


def without_cluster(overrides: Sequence[str]) -> list[str]:
    """What says where the run is carried out is left out: its processes are there already."""
    keys = [override.lstrip("+~").partition("=")[0] for override in overrides]
    return [
        override
        for override, key in zip(overrides, keys, strict=True)
        if key != "cluster" and not key.startswith("cluster.")
    ]
