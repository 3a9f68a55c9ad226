"""This process's place among the processes that train together."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

GROUP_FOLDER = "DSPARK_LAB_GROUP_FOLDER"
"""Set for the ranks that a pipeline process starts: where their logs and outcome go. That process holds the run's lock."""


@dataclass(frozen=True, slots=True)
class Place:
    """``rank`` of ``num_ranks``, ``local_rank`` on this machine.

    ``group_folder`` is None unless a pipeline process of ours started this one.
    """

    rank: int
    local_rank: int
    num_ranks: int
    group_folder: Path | None

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> "Place":
        """From the variables that our own launcher and torchrun set, or those of a step that srun started."""
        folder = environment.get(GROUP_FOLDER)
        if "WORLD_SIZE" in environment and "RANK" in environment:
            names = "RANK", "LOCAL_RANK", "WORLD_SIZE"
        elif int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            names = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"
        else:
            return cls(0, 0, 1, None)
        rank, local_rank, num_ranks = (int(environment[name]) for name in names)
        return cls(rank, local_rank, num_ranks, Path(folder) if folder else None)

    @property
    def leads(self) -> bool:
        """Whether this process locks the run and writes its results: alone, or rank 0 of a group started elsewhere."""
        return self.rank == 0 and self.group_folder is None


def cluster_environment(environment: Mapping[str, str] = os.environ) -> ClusterEnvironment:
    """Chosen by us: inside any Slurm allocation, Lightning would take this process for a rank that srun started."""
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and GROUP_FOLDER not in environment:
        return SLURMEnvironment(auto_requeue=False)
    return LightningEnvironment()


def num_devices(devices: int | Literal["auto"], accelerator: str) -> int:
    """Ranks of one machine; "auto" is one for each GPU, or one where there is none."""
    if devices != "auto":
        return devices
    return max(torch.cuda.device_count(), 1) if accelerator in ("auto", "gpu", "cuda") else 1
