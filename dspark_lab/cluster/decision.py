"""What one command does on the machine it is typed on: run, render a job and stop, or say what is missing."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dspark_lab.nothere import Missing

Decision = Literal["run", "render", "plan"]
"""*run*: here and now. *render*: write the job's script, print the plan and how to submit it. *plan*: print the plan and
what is missing, exit code 3."""

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
        inside = "SLURM_JOB_ID" in environment
        return cls(
            num_nodes=int(environment.get("SLURM_JOB_NUM_NODES", "1")) if inside else 0,
            can_submit=which("sbatch") is not None,
        )


def decide(
    stages: Sequence[str], *, cluster: str, num_nodes: int, scheduler: Scheduler
) -> tuple[Decision, Sequence[Missing]]:
    """The table of docs/gb300.md. ``num_nodes``: that a job of this config has."""
    if cluster != "slurm" or set(stages) <= ANYWHERE:
        return "run", []
    if scheduler.num_nodes >= num_nodes:
        return "run", []
    if scheduler.num_nodes > 0:
        return "plan", [
            Missing(
                f"this Slurm allocation has {scheduler.num_nodes} nodes, the job needs {num_nodes}",
                f"allocate {num_nodes} (salloc -N{num_nodes} ...), or change cluster.num_sets and trainer.devices",
            )
        ]
    if scheduler.can_submit:
        return "render", []
    return "plan", [
        Missing(
            f"{num_nodes} nodes: no Slurm is here (no sbatch), and no services are named",
            "run the same command on a login node of the rack; or start the services yourself and name them: "
            "cluster=attach engine.endpoints=[http://host:port] cluster.mooncake.master_address=host:port; or rehearse it "
            "here in small: +rehearse=cpu",
        )
    ]
