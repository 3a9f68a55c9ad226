"""What is watched while a drafter trains."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from dspark_lab.drafter.base import Drafter
from dspark_lab.evaluation.acceptance import acceptance_length
from dspark_lab.evaluation.replay import evaluate_replay
from dspark_lab.progress import bar
from dspark_lab.records import Batch, Sampling, TargetSample, TokenizedConversation
from dspark_lab.validation import checked


class ReplayAcceptance(Callback):
    """``val/acceptance_length``: a few held-out greedy answers, replayed at every validation, no target forward."""

    @checked
    def __init__(
        self,
        *,
        conversations: Sequence[TokenizedConversation],
        read_sample: Callable[[str], TargetSample],
        num_conversations: int,
        seed: int,
    ) -> None:
        if num_conversations < 1:
            raise ValueError(f"num_conversations={num_conversations} must be at least 1")
        self.conversations = conversations[:num_conversations]
        self.read_sample, self.seed = read_sample, seed

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Drafter)
        result = evaluate_replay(
            pl_module,
            self.read_sample,
            self.conversations,
            sampling=Sampling(),
            num_draft_tokens=pl_module.num_draft_tokens,
            target_head=pl_module.target_head,
            eos_token_ids=pl_module.target.eos_token_ids,
            seed=self.seed,
        )
        pl_module.log("val/acceptance_length", acceptance_length(result.traces), prog_bar=True, batch_size=1)


class Accounting(Callback):
    """Tokens trained on and the share of time that training waited for data, carried over a resume."""

    def __init__(self) -> None:
        self.tokens = 0
        self._wait_s, self._since = 0.0, time.monotonic()
        self._window_start, self._window_tokens = time.monotonic(), 0

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens = state_dict["tokens"]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = time.monotonic()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        self._wait_s += time.monotonic() - self._since

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self.tokens += batch.num_tokens
        self._since = time.monotonic()
        pl_module.log("tokens", float(self.tokens), batch_size=1)
        elapsed = self._since - self._window_start
        if trainer.global_step % trainer.log_every_n_steps == 0 and elapsed > 0:  # pyright: ignore
            pl_module.log("train/tokens_per_s", (self.tokens - self._window_tokens) / elapsed, batch_size=1)
            pl_module.log("train/data_wait_share", self._wait_s / elapsed, batch_size=1)
            self._wait_s, self._window_start, self._window_tokens = 0.0, self._since, self.tokens


class StepProgress(Callback):
    """One bar over all optimizer steps, with the newest loss and acceptance; Lightning's own starts anew every epoch."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._progress = bar()
        self._progress.start()
        self._task = self._progress.add_task("train", total=trainer.max_steps, completed=trainer.global_step, note="")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        shown = {name: trainer.callback_metrics.get(name) for name in ("train/loss", "val/acceptance_length")}
        note = "  ".join(f"{name} {float(value):.3f}" for name, value in shown.items() if value is not None)
        self._progress.update(self._task, completed=trainer.global_step, note=note)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._progress.stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._progress.stop()


class StopOnNonFiniteLoss(Callback):
    """A loss that is NaN or infinite ends training at once, naming the rows; the last checkpoint stays good."""

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if not torch.isfinite(loss.detach()):
            raise ValueError(
                f"train/loss is {float(loss.detach())} at step {trainer.global_step}: lower optimizer.lr or "
                "trainer.gradient_clip; the last checkpoint is kept and the same command resumes from it"
            )
