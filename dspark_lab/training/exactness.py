"""What makes a resumed run equal to an uninterrupted one, beside the states that Lightning saves."""

import random
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.fsdp import FSDPModule

from dspark_lab.progress import console
from dspark_lab.records import Batch
from dspark_lab.report.metrics_log import read_metrics


class KeyedRandomness(Callback):
    """Python's, NumPy's and torch's generators start every batch from (seed, epoch, rows), as anchors do.

    So no generator's state has to be saved, whatever validation or another callback has drawn in between, and each rank
    draws what belongs to its rows.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        key = hash((self.seed, batch.epoch, batch.row_ids)) & (2**63 - 1)  # of integers: the same in every process
        random.seed(key)
        np.random.seed(key & (2**32 - 1))
        torch.manual_seed(key)


class OptimizerKeys(Callback):
    """Numbers a checkpoint's optimizer state by the parameters' place in the module, as FSDP2 reads and writes it.

    An optimizer numbers them by their place in its groups, so that a run could not go on under the other strategy. It
    loads any numbers: within each group only their order counts.
    """

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if isinstance(pl_module, FSDPModule):
            return
        place = {id(parameter): index for index, parameter in enumerate(pl_module.parameters())}
        for optimizer, state in zip(trainer.optimizers, checkpoint["optimizer_states"], strict=True):
            used = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            number = {old: place[id(parameter)] for old, parameter in enumerate(used)}
            state["state"] = {number[old]: value for old, value in state["state"].items()}
            for group in state["param_groups"]:
                group["params"] = [number[old] for old in group["params"]]


class LoggedStep(Callback):
    """Carries a step's metrics in its checkpoint: Lightning logs them only after, and a kill in between would lose them."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.carried: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.global_step % trainer.log_every_n_steps == 0:  # pyright: ignore[reportAttributeAccessIssue]
            known = trainer.callback_metrics.items()  # those of validation are of an earlier step
            metrics = {name: float(value) for name, value in known if not name.startswith("val/")}
            checkpoint["logged_step"] = {"step": trainer.global_step - 1, "metrics": metrics}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.carried = checkpoint.get("logged_step", {})

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.carried:
            logged = {line.get("step") for line in read_metrics(self.run_dir) if "train/loss" in line}
            if self.carried["step"] not in logged:
                for logger in trainer.loggers:
                    logger.log_metrics(self.carried["metrics"], step=self.carried["step"])
            self.carried = {}


class Surroundings(Callback):
    """What the last bits of a sum depend on, recorded in each checkpoint; a resume elsewhere says what differs."""

    def __init__(self) -> None:
        self.recorded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.recorded

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.recorded = state_dict

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        present = surroundings(trainer)
        changed = {name: value for name, value in self.recorded.items() if present.get(name) != value}
        if changed:
            was = ", ".join(f"{name} {value} (now {present.get(name)})" for name, value in changed.items())
            console.print(
                f"train: [bold]not bit for bit[/bold] what an uninterrupted run would give: the checkpoint was made with "
                f"{was}; sums may differ in their last bits"
            )
        self.recorded = present


def surroundings(trainer: L.Trainer) -> dict[str, Any]:
    device = trainer.strategy.root_device
    return {
        "torch": str(torch.__version__),
        "lightning": L.__version__,
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability(),
        "precision": str(trainer.precision),
        "strategy": type(trainer.strategy).__name__,
        "ranks": trainer.world_size,
        "threads": torch.get_num_threads(),
    }
