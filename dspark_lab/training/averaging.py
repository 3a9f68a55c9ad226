"""An exponential moving average of the weights.

Lightning's ``EMAWeightAveraging`` does not do here: weights-only checkpoints (``best.ckpt``) would hold the weights that are
not averaged, as it leaves them out, and it copies the whole module, the target's matrices included.
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor

from dspark_lab.records import Batch
from dspark_lab.validation import checked

OWN_WEIGHTS = "weights_not_averaged"
"""Key of a checkpoint: the trained parameters, where ``state_dict`` has their averages."""


class WeightAverage(Callback):
    """Averages the parameters after every optimizer step; the averages are what is validated, saved and evaluated.

    After n steps an average is ``d * average + (1 - d) * parameter`` with d = min(``decay``, (1 + n) / (10 + n)): a short
    run is not left with its first weights. Training goes on from the parameters themselves, over a resume too.
    """

    @checked
    def __init__(self, *, decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay={decay} must lie in (0, 1); 0.99 averages over about the last 100 steps")
        self.decay = decay
        self.num_steps = 0
        self.averages: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] | None = None  # the parameters, while the module holds the averages

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
            raise ValueError("callbacks.ema cannot average sharded weights: choose trainer=ddp or leave it out")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step_seen = trainer.global_step
        parameters = _trainable(pl_module)
        self.averages = {
            name: self.averages.get(name, parameter).detach().to(parameter.device, copy=True)
            for name, parameter in parameters.items()
        }

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step_seen:  # gradients are still being accumulated
            return
        self._step_seen = trainer.global_step
        self.num_steps += 1
        decay = min(self.decay, (1 + self.num_steps) / (10 + self.num_steps))
        for name, parameter in _trainable(pl_module).items():
            self.averages[name].lerp_(parameter, 1 - decay)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.averages and self._own is None:
            self._own = _exchanged(pl_module, self.averages)

    # The averages stay until training goes on: after the validation a checkpoint of the best ones is written.
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        self._restore(pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore(pl_module)

    def _restore(self, module: L.LightningModule) -> None:
        if self._own is not None:
            _exchanged(module, self._own)
            self._own = None

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps = state_dict["num_steps"]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        own = self._own if self._own is not None else _trainable(pl_module)
        checkpoint[OWN_WEIGHTS] = {name: parameter.detach() for name, parameter in own.items()}
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **self.averages}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if OWN_WEIGHTS not in checkpoint:
            raise ValueError("the checkpoint was written without callbacks/ema: leave it out, or start a fresh run")
        own = checkpoint[OWN_WEIGHTS]
        self.averages = {name: checkpoint["state_dict"][name] for name in own}
        pl_module.load_state_dict({**checkpoint["state_dict"], **own})


def _trainable(module: L.LightningModule) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


@torch.inference_mode(False)  # Lightning validates in it, and training goes on from these tensors
@torch.no_grad()
def _exchanged(module: L.LightningModule, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies ``weights`` into the module's parameters and returns what they were."""
    parameters = _trainable(module)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
    return before
