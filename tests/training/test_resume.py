"""A killed training goes on, bit for bit, as if it had not been killed."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import fit, in_process, train
from tiny_world import build

from dspark_lab.report.metrics_log import curve, read_metrics
from dspark_lab.signals import REQUEUE
from dspark_lab.training.checkpoints import checkpoint_step

pytestmark = [pytest.mark.slow]


def losses(run_dir: Path) -> dict[float, float]:
    found = curve(read_metrics(run_dir), "train/loss")
    assert found is not None
    return dict(zip(found.step, found.value, strict=True))


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def assert_same_run(run_dir: Path, uninterrupted: Path) -> None:
    assert losses(run_dir) == losses(uninterrupted)
    ours, theirs = weights(run_dir), weights(uninterrupted)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def run_whole(run_dir: Path, **settings) -> Path:
    process = in_process(train, run_dir, **settings)
    process.join()
    assert process.exitcode == 0
    return run_dir


def step_of(run_dir: Path) -> int:
    """The newest step whose loss is written."""
    return max((line["step"] for line in read_metrics(run_dir) if "train/loss" in line), default=-1)


@pytest.mark.parametrize(("name", "num_kills"), [("dspark", 20), ("eagle3", 4), ("dflash", 4)])
def test_kills_at_random_moments_change_no_bit(tmp_path: Path, name: str, num_kills: int) -> None:
    settings = {
        "name": name,
        "max_steps": 3 * num_kills + 4,
        "noisy": True,
        "checkpoint_every_steps": 2,
        "num_workers": 1,
    }
    uninterrupted = run_whole(tmp_path / "whole", **settings)
    killed, generator, kills = tmp_path / "killed", random.Random(7), 0
    while True:
        goal = step_of(killed) + generator.randrange(1, 5)
        process = in_process(train, killed, **settings)
        while process.is_alive() and (step_of(killed) < goal or kills == num_kills):
            time.sleep(0.005)
        time.sleep(generator.uniform(0, 0.05))
        if not process.is_alive():
            break
        process.kill()
        process.join()
        kills += 1
    assert process.exitcode == 0 and kills == num_kills
    assert_same_run(killed, uninterrupted)


def die_after_a_checkpoint(run_dir: Path, *, steps: int, **settings: Any) -> None:
    """Train, killed when the checkpoint of ``steps`` is written and that step is not logged yet."""
    drafter = build(settings["name"])

    def on_train_batch_end(*_: Any) -> None:  # Lightning calls it after the callbacks, before the loggers
        if drafter.global_step == steps:
            os.kill(os.getpid(), signal.SIGKILL)

    drafter.on_train_batch_end = on_train_batch_end
    fit(run_dir, drafter=drafter, **settings)


def test_a_kill_between_checkpoint_and_logger_loses_no_point(tmp_path: Path) -> None:
    settings = {"name": "dflash", "max_steps": 9, "checkpoint_every_steps": 2, "log_every_steps": 2}
    process = in_process(die_after_a_checkpoint, tmp_path / "killed", steps=4, **settings)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert checkpoint_step(tmp_path / "killed" / "checkpoints" / "last.ckpt") == 4 and step_of(tmp_path / "killed") == 1
    uninterrupted = run_whole(tmp_path / "whole", **settings)
    assert_same_run(run_whole(tmp_path / "killed", **settings), uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_signal_saves_the_step_and_asks_to_be_run_again(tmp_path: Path, number: int, accumulate: int) -> None:
    settings = {"max_steps": 300, "checkpoint_every_steps": 1000, "accumulate": accumulate, "val_every_steps": 100}
    process = in_process(train, tmp_path / "stopped", **settings)
    while step_of(tmp_path / "stopped") < 5:
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == REQUEUE
    saved = checkpoint_step(tmp_path / "stopped" / "checkpoints" / "last.ckpt")
    assert 5 < saved <= step_of(tmp_path / "stopped") + 1 < 300
    again = run_whole(tmp_path / "stopped", **settings | {"max_steps": saved + 7})
    assert_same_run(again, run_whole(tmp_path / "whole", **settings | {"max_steps": saved + 7}))
