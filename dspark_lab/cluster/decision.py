"""What one command does on the machine it is typed on: run, write a job, or say what is missing (docs/gb300.md)."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dspark_lab.nothere import Missing

ANYWHERE = frozenset({"plan", "doctor", "simulate", "report"})  # stages that need no cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """What of Slurm is here. ``num_nodes`` of the allocation that this process is in; 0: it is in none."""

    num_nodes: int
    can_submit: bool

    @classmethod
    def found(
        cls,
        environment: Mapping[str, str] = os.environ,
        which: Callable[[str], str | None] = shutil.which,
    ) -> "Scheduler":
        told = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or 1
        return cls(
            num_nodes=int(told) if "SLURM_JOB_ID" in environment else 0,
            can_submit=which("sbatch") is not None,
        )


def needs_job(stages: Sequence[str], *, cluster: str) -> bool:
    """Whether the stages are done by a job of Slurm rather than here and now."""
    return cluster == "slurm" and not set(stages) <= ANYWHERE


def missing_for_job(*, num_nodes: int, scheduler: Scheduler) -> Sequence[Missing]:
    """What a job of ``num_nodes`` nodes lacks here: nothing in an allocation of that size, and where jobs are submitted."""
    if scheduler.num_nodes == num_nodes or (scheduler.num_nodes == 0 and scheduler.can_submit):
        return []
    if scheduler.num_nodes > 0:
        return [
            Missing(
                f"this Slurm allocation has {scheduler.num_nodes} nodes, the job needs {num_nodes}: "
                "cluster.num_sets x cluster.nodes_per_set for engines and trainer.num_nodes for training",
                f"give the command in one of {num_nodes} (salloc -N{num_nodes} ...) or in none, or change these numbers",
            )
        ]
    return [
        Missing(
            f"{num_nodes} nodes: no Slurm is here (no sbatch), and no services are named",
            "run the same command on a login node of the rack; or start the services yourself and name them: "
            "cluster=attach engine.endpoints=[http://host:port] cluster.mooncake.master_address=host:port; or rehearse it "
            "here in small: +rehearse=cpu",
        )
    ]
