"""Live data while it is trained on: payloads go after the step that used them, counts are shown, and a stop is saved."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from dspark_lab.capture.protocol import REASONS
from dspark_lab.data.live import LiveCounts, LiveDataError, LiveInterrupted
from dspark_lab.data.live_loader import LiveLoader
from dspark_lab.progress import console
from dspark_lab.records import Batch
from dspark_lab.training.collectives import sum_over_ranks

COUNTED = ("generated", "used", "regenerated", "reused", "lost", "waiting")


class LiveWatch(Callback):
    """Frees the window after every optimizer step, logs ``live/...`` counts of all ranks, and writes ``path`` when live
    data ends the training: on all ranks, before the step that could not be fed.

    Counts go on over a resume; ``live/waiting`` is what is under way at the moment.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.totals: dict[str, int] = {}  # of all ranks, at the last optimizer step
        self._before: dict[str, int] = {}  # of the run's earlier processes
        self._step = 0
        self._loops: dict[str, Any] | None = None  # Lightning's state at the end of the last step
        self._stopped = False

    @property
    def note(self) -> str:
        """For a progress bar."""
        shown = ("generated", "used", "waiting", "regenerated", "lost")
        return "  ".join(f"{name} {self.totals.get(name, 0)}" for name in shown)

    @property
    def events(self) -> dict[str, int]:
        """For the record of the stage."""
        return {f"live samples {name.replace('_', ' ')}": count for name, count in self.state_dict().items() if count}

    def state_dict(self) -> dict[str, Any]:
        return {name: count for name, count in self.totals.items() if name != "waiting"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = dict(state_dict)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # gradients are being accumulated
        self._step = trainer.global_step
        self._loops = trainer.fit_loop.state_dict()
        loader = trainer.train_dataloader
        assert isinstance(loader, LiveLoader)
        loader.release()
        now = over_ranks(loader.counts, device=pl_module.device)
        self.totals = {name: count + self._before.get(name, 0) for name, count in now.items()}
        for name, count in self.totals.items():
            if count or name in COUNTED:
                pl_module.log(f"live/{name}", float(count), batch_size=1)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Before the first step there is nothing to save: the checkpoint that training began with is still the newest.
        if isinstance(exception, LiveDataError | LiveInterrupted) and self._loops is not None:
            self._stopped = True
            trainer.save_checkpoint(self.path, weights_only=False)
            console.print(f"train: step {trainer.global_step} is saved; the same command goes on from it")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        # As all other checkpoints, one of the end of a step: resuming from a place between a validation and the next
        # batch, Lightning 2.6 counts a step too many.
        if self._stopped:
            checkpoint["loops"]["fit_loop"] = self._loops


def over_ranks(counts: LiveCounts, *, device: torch.device) -> dict[str, int]:
    """The sums over all ranks; those of the reasons as ``rejected_<reason>``."""
    own = {name: getattr(counts, name) for name in COUNTED}
    own |= {f"rejected_{reason}": counts.rejected[reason] for reason in REASONS}
    sums = sum_over_ranks(torch.tensor(list(own.values()), dtype=torch.int64, device=device)).tolist()
    return dict(zip(own, sums, strict=True))
