"""What training costs, counted and shown."""

import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from dspark_lab.progress import bar
from dspark_lab.records import Batch
from dspark_lab.training.collectives import sum_over_ranks
from dspark_lab.training.flops import FlopCount, measure_peak_flops

COUNTED_BATCHES, COUNTED_EVERY = 4, 16
"""FLOPs are counted of the first batches and then of every so many: they vary with a row's number of supervised slots."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Of all batches trained on. ``tokens`` are those of all ranks; the rest is this rank's.

    ``time_s`` is that of steps and of waiting for their batches, without validation; ``capacity`` the FLOPs that the
    device could have done in it.
    """

    tokens: int = 0
    rows: int = 0
    time_s: float = 0.0
    wait_s: float = 0.0
    capacity: float = 0.0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __sub__(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))


class Accounting(Callback):
    """Tokens per second, share of time waiting for data, and MFU; the totals are carried over a resume.

    MFU: FLOPs of the forward and backward passes / those that the device could have done in the time, by the speed of a
    large matrix product measured when training starts. The FLOPs of a row are the mean over the batches that are counted.
    """

    def __init__(self) -> None:
        self.totals = self._logged = Totals()
        self.counted_flops = self.counted_rows = self.counted_batches = 0
        self._count: FlopCount | None = None
        self._counting = ExitStack()
        self._warm = False  # a first batch compiles kernels

    @property
    def tokens(self) -> int:
        return self.totals.tokens

    def rates(self, totals: Totals) -> dict[str, float]:
        """``tokens_per_s``, ``data_wait_share`` and, once FLOPs were counted, ``mfu``; none without a batch."""
        if totals.time_s <= 0:
            return {}
        found = {"tokens_per_s": totals.tokens / totals.time_s, "data_wait_share": totals.wait_s / totals.time_s}
        flops = self.flops(totals)
        if flops is not None:
            found["mfu"] = flops / totals.capacity
        return found

    def flops(self, totals: Totals) -> float | None:
        """Of this rank's forward and backward passes; None before any were counted."""
        return totals.rows * self.counted_flops / self.counted_rows if self.counted_rows else None

    def state_dict(self) -> dict[str, Any]:
        counted = {"flops": self.counted_flops, "rows": self.counted_rows, "batches": self.counted_batches}
        return {"totals": asdict(self.totals), "counted": counted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.totals = self._logged = Totals(**state_dict["totals"])
        counted = state_dict["counted"]
        self.counted_flops, self.counted_rows = counted["flops"], counted["rows"]
        self.counted_batches = counted["batches"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        dtype = torch.bfloat16 if trainer.precision.startswith("bf16") else torch.float32
        self.peak_flops = measure_peak_flops(pl_module.device, dtype)
        self._since = time.monotonic()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = time.monotonic()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        self._wait_s = time.monotonic() - self._since
        if self._warm and (self.counted_batches < COUNTED_BATCHES or trainer.global_step % COUNTED_EVERY == 0):
            self._count = self._counting.enter_context(FlopCount())

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._counting.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._counting.close()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        rows = batch.token_ids.shape[0]
        if self._count is not None:
            self.counted_flops += self._count.flops
            self.counted_rows += rows
            self.counted_batches += 1
        self._count, self._warm = None, True
        num_tokens = torch.tensor(batch.num_tokens, device=pl_module.device)
        tokens = int(sum_over_ranks(num_tokens))
        now = time.monotonic()
        time_s, self._since = now - self._since, now
        self.totals += Totals(tokens, rows, time_s, self._wait_s, time_s * self.peak_flops)
        pl_module.log("tokens", float(self.totals.tokens), batch_size=1)
        if trainer.global_step % trainer.log_every_n_steps == 0:  # pyright: ignore[reportAttributeAccessIssue]
            for name, value in self.rates(self.totals - self._logged).items():
                pl_module.log(f"train/{name}", value, batch_size=1)
            self._logged = self.totals


class StepProgress(Callback):
    """One bar over all optimizer steps, with the newest loss and acceptance; Lightning's own starts anew every epoch."""

    def __init__(self) -> None:
        self._progress = bar()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._progress.start()
        self._task = self._progress.add_task("train", total=trainer.max_steps, completed=trainer.global_step, note="")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        shown = {name: trainer.callback_metrics.get(name) for name in ("train/loss", "val/acceptance_length")}
        notes = [f"{name} {float(value):.3f}" for name, value in shown.items() if value is not None]
        notes += [callback.note for callback in trainer.callbacks if hasattr(callback, "note")]  # pyright: ignore
        note = "  ".join(notes)
        self._progress.update(self._task, completed=trainer.global_step, note=note)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._progress.stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._progress.stop()
