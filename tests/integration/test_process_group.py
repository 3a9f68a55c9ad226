"""`trainer.devices=2` through the command line: one pipeline process, two ranks, and every way to end them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dspark_lab.report.metrics_log import read_metrics
from dspark_lab.report.results import read_results
from dspark_lab.signals import REQUEUE
from dspark_lab.training.checkpoints import checkpoint_step

pytestmark = pytest.mark.slow
SMALL = [
    *("+experiment=smoke", "data.train.num_prompts=60", "data.validation.num_prompts=8"),
    *("benchmark.prompts.num_prompts=8", "evaluate.mode=replay", "trainer.checkpoint_every_steps=1"),
    "trainer.log_every_steps=1",
]
TWO_RANKS = ["trainer.devices=2", "data.rows_per_batch=1"]
ONE_RANK = ["trainer.devices=1", "data.rows_per_batch=2"]


class Lab:
    """Commands of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "DSPARK_LAB_HOME": str(folder / "home"),
            "COLUMNS": "120",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        flags = [override for override in overrides if override == "-m"]
        chosen = [override for override in overrides if override != "-m"]
        command = [sys.executable, "-m", "dspark_lab", *flags, *SMALL, f"run.root={self.folder / 'runs'}", *chosen]
        return subprocess.Popen(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def call(self, *overrides: str) -> str:
        process = self.start(*overrides)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out[-2000:] + err[-4000:]
        return out + err

    @property
    def run_dir(self) -> Path:
        (found,) = self.folder.glob("runs/*-*")
        return found

    def step(self) -> int:
        """The newest step that is saved."""
        last = self.run_dir / "checkpoints" / "last.ckpt"
        return checkpoint_step(last) if last.exists() else 0

    def ranks(self) -> list[int]:
        """Process ids of this folder's ranks that live, in order of their start. Not those of their data workers."""
        marker = f"DSPARK_LAB_GROUP_FOLDER={self.folder}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                variables = (process / "environ").read_bytes().split(b"\0")  # empty for one that is dead
            except OSError:
                continue
            pid = int(process.name)
            if any(variable.startswith(marker) for variable in variables) and os.getsid(pid) == pid:
                found.append(pid)
        return sorted(found)

    def wait(self, condition, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = Lab(tmp_path_factory.mktemp("group"))
    lab.call("stages=[regenerate,capture]", *ONE_RANK)
    return lab


def test_every_way_to_end_a_group_leaves_no_rank_and_a_run_that_goes_on(lab: Lab) -> None:
    long = ["stages=train", "trainer.max_steps=2000", *TWO_RANKS]

    process = lab.start(*long)
    lab.wait(lambda: lab.step() >= 3, process)
    os.kill(max(lab.ranks()), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and re.search(r"error: .*was killed by SIGKILL", err), err
    assert "Traceback" not in err.split("error: ")[-1].split("\n")[0]
    assert lab.ranks() == []
    assert "was killed by SIGKILL" in str(read_results(lab.run_dir).stages[-1].error)

    process, before = lab.start(*long), lab.step()
    lab.wait(lambda: lab.step() >= before + 3, process)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while lab.ranks():
        assert time.monotonic() < deadline, "ranks outlive the pipeline process"
        time.sleep(0.05)

    process, before = lab.start(*long), lab.step()
    lab.wait(lambda: lab.step() >= before + 3, process)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == REQUEUE and "is saved, the same command goes on" in out
    assert lab.ranks() == []

    before = lab.step()
    printed = lab.call("stages=[train,evaluate]", f"trainer.max_steps={before + 4}", *ONE_RANK)
    assert f"going on from step {before} of {before + 4}" in printed
    assert "the checkpoint was made with strategy DDPStrategy (now SingleDeviceStrategy), ranks 2 (now 1)" in printed
    steps = [line["step"] for line in read_metrics(lab.run_dir) if "train/loss" in line]
    assert max(steps) == before + 3


def test_the_pipeline_runs_all_else_once_and_reports_the_groups_training(lab: Lab) -> None:
    printed = lab.call("stages=[train,evaluate]", "drafter=dflash", "run.name=whole", *TWO_RANKS)
    assert printed.count("train: 2 ranks") == printed.count("replay ") == 1
    results = read_results(lab.folder / "runs" / "whole")
    assert [stage.name for stage in results.stages] == ["train", "evaluate"]
    assert "stages=[train,evaluate]" in results.run.command
    assert next(entry.value for entry in results.metrics if entry.name == "num_train_steps") == 40


def test_a_sweep_in_one_process_may_train_in_groups(lab: Lab) -> None:
    printed = lab.call("-m", "stages=train", "trainer=fsdp", "drafter=dflash,eagle3", "trainer.max_steps=4", *TWO_RANKS)
    assert printed.count("train: 2 ranks") == 2
    for drafter in ("dflash", "eagle3"):
        (found,) = lab.folder.glob(f"runs/smoke-{drafter}-*")
        assert checkpoint_step(found / "checkpoints" / "last.ckpt") == 4
