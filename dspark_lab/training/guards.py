"""What keeps a bad step from spoiling a run."""

import math
from collections import deque
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from dspark_lab.records import Batch
from dspark_lab.validation import checked


class SpikeGuard(Callback):
    """Refuses steps whose gradient norm or loss lies above ``max_ratio`` times its median over the last accepted steps.

    The drafter asks ``refuses`` before every optimizer step and skips the step at True. Medians are over ``window``
    accepted steps; before there are as many, only values that are not finite are refused. More than ``max_skipped``
    refusals in a row end the training.
    """

    @checked
    def __init__(self, *, max_ratio: float, window: int, max_skipped: int) -> None:
        if max_ratio <= 1 or window < 1 or max_skipped < 0:
            raise ValueError(
                f"max_ratio={max_ratio} (> 1), window={window} (>= 1) and max_skipped={max_skipped} (>= 0): one of them "
                "is out of its range"
            )
        self.max_ratio, self.window, self.max_skipped = max_ratio, window, max_skipped
        self.recent = {name: deque[float](maxlen=window) for name in ("gradient norm", "loss")}
        self.num_skipped = self.num_in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        recent = {name: list(values) for name, values in self.recent.items()}
        return {"recent": recent, "num_skipped": self.num_skipped, "num_in_a_row": self.num_in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.recent = {name: deque(values, maxlen=self.window) for name, values in state_dict["recent"].items()}
        self.num_skipped, self.num_in_a_row = state_dict["num_skipped"], state_dict["num_in_a_row"]

    def refuses(self, *, step: int, loss: float, gradient_norm: float) -> bool:
        """Whether to skip optimizer step ``step``. ``gradient_norm`` is the one before clipping.

        With several ranks both values must be those of all ranks together, so that every rank decides alike.

        Raises:
            ValueError: this refusal is one too many in a row.
        """
        values = {"gradient norm": gradient_norm, "loss": loss}
        spike = next((name for name, value in values.items() if self._is_spike(name, value)), None)
        if spike is None:
            self.num_in_a_row = 0
            for name, value in values.items():
                self.recent[name].append(value)
            return False
        self.num_skipped += 1
        self.num_in_a_row += 1
        if self.num_in_a_row > self.max_skipped:
            usual = f"{median(self.recent[spike]):.3g}" if self.recent[spike] else "not known yet"
            raise ValueError(
                f"{spike} is {values[spike]:.3g} at step {step}, its median over the last {len(self.recent[spike])} "
                f"accepted steps {usual}: with this one {self.num_in_a_row} steps in a row were skipped, more than "
                f"callbacks.spike_guard.max_skipped={self.max_skipped}; lower optimizer.lr or trainer.gradient_clip, or "
                f"raise callbacks.spike_guard.max_ratio={self.max_ratio:g}"
            )
        return True

    def _is_spike(self, name: str, value: float) -> bool:
        recent = self.recent[name]
        if not math.isfinite(value):
            return True
        return len(recent) == self.window and 0 < self.max_ratio * median(recent) < value

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        pl_module.log("train/skipped_steps", float(self.num_skipped), batch_size=1)


class StopOnNonFiniteLoss(Callback):
    """A loss that is NaN or infinite ends training at once; its rows are saved, the last checkpoint stays good.

    ``<run_dir>/non_finite_step_<n>.pt`` holds the batch field by field, the step and the loss, for ``torch.load``.
    """

    @checked
    def __init__(self, *, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._batch: Batch | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        self._batch = batch

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if torch.isfinite(loss.detach()):
            self._batch = None  # else it would still be on the device when the next one arrives
            return
        assert self._batch is not None
        value, step, batch = float(loss.detach()), trainer.global_step, self._batch.to("cpu")
        rank = f"_rank_{trainer.global_rank}" if trainer.world_size > 1 else ""
        path = self.run_dir / f"non_finite_step_{step}{rank}.pt"
        content = {field.name: getattr(batch, field.name) for field in fields(batch)}
        torch.save({**content, "step": step, "loss": value}, path)
        raise ValueError(
            f"train/loss is {value} at step {step}, rows {list(batch.row_ids)} of epoch {batch.epoch} (saved in {path}): "
            "lower optimizer.lr or trainer.gradient_clip; the last checkpoint is kept and the same command resumes from it"
        )
