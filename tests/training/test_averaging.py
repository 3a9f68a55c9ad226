"""The moving average of the weights: what is validated, saved and evaluated, while training goes on from its own."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from fitting import RESUMING, fit
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from tiny_world import build
from torch import Tensor

from dspark_lab.training.averaging import OWN_WEIGHTS, WeightAverage

pytestmark = RESUMING


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


class Recorder(Callback):
    """The weights after each step and at each validation."""

    def __init__(self) -> None:
        self.trained: list[dict[str, Tensor]] = []
        self.validated: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: Any) -> None:
        self.trained.append(weights(pl_module))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validated.append(weights(pl_module))


def averaged(start: dict[str, Tensor], trained: list[dict[str, Tensor]], *, decay: float) -> dict[str, Tensor]:
    """Naively, from the recorded weights."""
    average = start
    for n, after in enumerate(trained, start=1):
        d = min(decay, (1 + n) / (10 + n))
        average = {name: d * average[name] + (1 - d) * after[name] for name in after}
    return average


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], *, exactly: bool = True) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value) if exactly else torch.allclose(found[name], value, atol=1e-6), name


def test_averages_are_validated_and_saved_and_training_is_none_the_wiser(tmp_path: Path):
    drafter, plain = build("dspark"), build("dspark")
    start, recorder, undisturbed = weights(drafter), Recorder(), Recorder()
    fit(drafter, tmp_path / "ema", [WeightAverage(decay=0.3), recorder], steps=4)
    fit(plain, tmp_path / "plain", [undisturbed], steps=4)
    for with_average, without in zip(recorder.trained, undisturbed.trained, strict=True):
        assert_equal(with_average, without)
    for num_steps, validated in zip((2, 4), recorder.validated, strict=True):
        assert_equal(validated, averaged(start, recorder.trained[:num_steps], decay=0.3), exactly=False)
        assert not torch.equal(validated["fc.weight"], recorder.trained[num_steps - 1]["fc.weight"])
    best = torch.load(tmp_path / "ema" / "best.ckpt", weights_only=True)
    assert_equal(best["state_dict"], recorder.validated[best["global_step"] // 2 - 1])
    last = torch.load(tmp_path / "ema" / "last.ckpt", weights_only=True)
    assert_equal(last["state_dict"], recorder.validated[-1])
    assert_equal(last[OWN_WEIGHTS], recorder.trained[-1])
    assert_equal(weights(drafter), recorder.trained[-1])


def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path):
    whole, resumed = Recorder(), Recorder()
    fit(build("dspark"), tmp_path / "whole", [WeightAverage(decay=0.3), whole], steps=8)
    fit(build("dspark"), tmp_path / "parts", [WeightAverage(decay=0.3)], steps=4)
    fit(build("dspark"), tmp_path / "parts", [WeightAverage(decay=0.3), resumed], steps=8, resume=True)
    for found, expected in zip(resumed.trained, whole.trained[4:], strict=True):
        assert_equal(found, expected)
    assert_equal(resumed.validated[-1], whole.validated[-1])


def test_only_optimizer_steps_count(tmp_path: Path):
    average = WeightAverage(decay=0.3)
    fit(build("dflash"), tmp_path, [average], steps=2, accumulate_grad_batches=2)
    assert average.num_steps == 2


def test_a_checkpoint_without_averages_is_refused(tmp_path: Path):
    fit(build("dflash"), tmp_path, [], steps=2)
    with pytest.raises(ValueError, match="written without callbacks/ema"):
        fit(build("dflash"), tmp_path, [WeightAverage(decay=0.3)], steps=4, resume=True)


def test_sharded_weights_are_refused():
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer._accelerator_connector.strategy = ModelParallelStrategy()
    with pytest.raises(ValueError, match=r"callbacks\.ema cannot average sharded weights"):
        WeightAverage(decay=0.9).setup(trainer, L.LightningModule(), "fit")


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_decay_lies_between_zero_and_one(decay: float):
    with pytest.raises(ValueError, match=f"decay={decay} must lie in"):
        WeightAverage(decay=decay)
