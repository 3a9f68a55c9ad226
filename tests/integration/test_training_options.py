"""The options of training that are off by default, all at once, through the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspark_lab.report.metrics_log import read_metrics
from dspark_lab.report.results import read_results

pytestmark = pytest.mark.slow


def test_muon_wsd_averages_real_decoding_and_early_stop(tmp_path: Path) -> None:
    words = ["optimizer=muon", "lr_schedule=wsd", "callbacks/ema=default", "callbacks/decode=default",
             "callbacks/early_stop=default", "callbacks.decode.every_validations=2", "evaluate.num_decode_prompts=2",
             "data.train.num_prompts=60", "data.validation.num_prompts=8", "benchmark.prompts.num_prompts=8",
             "trainer.log_every_steps=5", "+experiment=smoke", f"run.root={tmp_path / 'runs'}"]  # fmt: skip
    environment = {**os.environ, "DSPARK_LAB_HOME": str(tmp_path / "home"), "COLUMNS": "120"}
    done = subprocess.run([sys.executable, "-m", "dspark_lab", *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (run,) = (tmp_path / "runs").iterdir()
    lines = read_metrics(run)
    curves = {name for line in lines for name in line}
    assert {"train/mfu", "train/skipped_steps", "val/acceptance_length", "val/decode_acceptance_length"} <= curves
    assert sum("val/decode_acceptance_length" in line for line in lines) == 1  # of two validations
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0]
    metrics = {metric.name: metric.value for metric in read_results(run).metrics}
    assert 0 < metrics["train_mfu"] < 1 and 0 < metrics["train_data_wait_share"] < 1
    last, best = (torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True) for name in ("last", "best"))
    assert not torch.equal(last["state_dict"]["fc.weight"], last["weights_not_averaged"]["fc.weight"])
    if best["global_step"] == last["global_step"]:
        assert torch.equal(best["state_dict"]["fc.weight"], last["state_dict"]["fc.weight"])
