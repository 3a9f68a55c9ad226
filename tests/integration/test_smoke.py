"""`+experiment=smoke`: the whole way, in processes of their own, killed and taken up again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dspark_lab.report.metrics_log import read_metrics
from dspark_lab.report.results import read_results

pytestmark = pytest.mark.slow
DRAFTERS = ("eagle3", "dflash", "dspark")
STAGES = ("regenerate", "capture", "train", "evaluate", "export", "report")


def command(folder: Path, *overrides: str) -> list[str]:
    root = f"run.root={folder / 'runs'}"
    return [sys.executable, "-m", "dspark_lab", *overrides, "+experiment=smoke", root]


def call(folder: Path, *overrides: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(folder, *overrides), capture_output=True, text=True, env=environment(folder))
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "DSPARK_LAB_HOME": str(folder / "home"), "COLUMNS": "120"}


def run_of(folder: Path, drafter: str) -> Path:
    (found,) = folder.glob(f"runs/smoke-{drafter}-????????")
    return found


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One multirun over all drafters: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("smoke")
    done = call(folder, "-m", f"drafter={','.join(DRAFTERS)}")
    return folder, done.stdout


def test_every_drafter_is_trained_and_measured(swept: tuple[Path, str]) -> None:
    folder, _ = swept
    for drafter in DRAFTERS:
        results = read_results(run_of(folder, drafter))
        assert [stage.name for stage in results.stages] == [*STAGES]
        assert all(stage.error is None for stage in results.stages)
        for origin in ("replayed", "measured"):
            found = [m for m in results.metrics if m.name == "acceptance_length" and m.origin == origin]
            assert len(found) == 1
            assert found[0].value is not None and found[0].low is not None and found[0].high is not None
            assert 1.0 < found[0].low <= found[0].value <= found[0].high
        assert next(m.value for m in results.metrics if m.name == "greedy_mismatch_rate") == 0.0


def test_replay_equals_decoding_on_the_same_prompts(swept: tuple[Path, str]) -> None:
    """Step by step; states are stored in bf16 here, so a near tie may fall the other way in a few of the steps."""
    folder, _ = swept
    for drafter in DRAFTERS:
        lines = [json.loads(line) for line in (run_of(folder, drafter) / "traces.jsonl").read_text().splitlines()]
        traces = {(line["origin"], line["prompt_id"]): line["steps"] for line in lines}
        decoded = [prompt for origin, prompt in traces if origin == "measured"]
        assert len(decoded) == 6
        same = [[s["num_accepted"] for s in traces["measured", p]] == [s["num_accepted"] for s in traces["replayed", p]]
                for p in decoded]  # fmt: skip
        assert sum(same) >= 4


def test_the_jobs_of_a_sweep_share_one_capture(swept: tuple[Path, str]) -> None:
    folder, _ = swept
    events = [next(s for s in read_results(run_of(folder, d)).stages if s.name == "capture").events for d in DRAFTERS]
    assert events[0]["already in the store"] == 0
    assert events[1]["captured"] == events[2]["captured"] == 0
    assert len(list((folder / "home" / "states").iterdir())) == 1


def test_training_lowers_the_loss_and_checkpoints_are_plain_tensors(swept: tuple[Path, str]) -> None:
    folder, _ = swept
    for drafter in DRAFTERS:
        run = run_of(folder, drafter)
        losses = [line["train/loss"] for line in read_metrics(run) if "train/loss" in line]
        assert losses[-1] < losses[0]
        for name in ("last", "best"):
            checkpoint = torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)
            assert not any("embed" in key or "lm_head" in key for key in checkpoint["state_dict"])


def test_real_decoding_under_a_scheduler_keeps_what_was_evaluated(swept: tuple[Path, str]) -> None:
    folder, _ = swept
    run = run_of(folder, "dspark")
    before = (run / "traces.jsonl").read_text()
    batch = ("evaluate.mode=batch", "evaluate.batch_sizes=[2]", "evaluate.num_batch_prompts=4")
    told = call(
        folder, "stages=evaluate", "drafter=dspark", "scheduler=fixed", "scheduler.num_verified_tokens=2", *batch
    ).stdout
    assert "2 together" in told and "by fixed, num_verified_tokens=2" in told
    found = {m.name: m for m in read_results(run).metrics if m.setting.get("batch_size") == 2}
    assert found["batch_greedy_mismatch_rate"].value == 0
    assert found["batch_verified_tokens_per_step"].value == 2
    assert {m.setting["scheduler"] for m in found.values()} == {"fixed, num_verified_tokens=2"}
    assert (run / "traces.jsonl").read_text() == before


def test_the_same_command_finds_everything_done(swept: tuple[Path, str]) -> None:
    folder, _ = swept
    again = call(folder, "drafter=dspark", "evaluate.mode=replay").stdout
    assert "464 of 464 answers are there already" in again
    assert re.search(r"going on from step 40 of 40", again)


def test_report_compares_the_runs_in_one_page(swept: tuple[Path, str]) -> None:
    folder, _ = swept
    printed = call(folder, "stages=report", f"report.runs=[{folder / 'runs'}]", f"report.out={folder}").stdout
    page = (folder / "report.html").read_text()
    for drafter in DRAFTERS:
        assert drafter in printed
        assert drafter in page


def kill_when(folder: Path, ready: Callable[[], bool], *overrides: str) -> None:
    process = subprocess.Popen(
        command(folder, *overrides), env=environment(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not ready():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_run_killed_in_each_stage_goes_on(tmp_path: Path) -> None:
    small = ["data.train.num_prompts=60", "data.validation.num_prompts=8", "benchmark.prompts.num_prompts=8",
             "evaluate.num_decode_prompts=2", "drafter=dspark", "trainer.val_every_steps=40"]  # fmt: skip

    def answers() -> int:
        return sum(file.read_bytes().count(b"\n") for file in tmp_path.glob("home/answers/*.jsonl"))

    kill_when(tmp_path, lambda: answers() > 20, *small)
    kept = answers()
    kill_when(tmp_path, lambda: any(tmp_path.glob("home/states/*/index/*")), *small)
    kill_when(tmp_path, lambda: any(tmp_path.glob("runs/*/checkpoints/last.ckpt")), *small)
    printed = call(tmp_path, *small).stdout
    assert kept > 20
    assert "answers are there already" in printed
    assert re.search(r"going on from step [123]0 of 40", printed)
    steps = [line["step"] for line in read_metrics(run_of(tmp_path, "dspark")) if "train/loss" in line]
    assert max(steps) == 39
    assert read_results(run_of(tmp_path, "dspark")).stages[-1].name == "report"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["stages=evaluate"], "no checkpoint: add train to stages"),
        (["stages=train"], "no answer yet: add regenerate to stages"),
        (["engine.layer_ids=[3,1]"], "target.layer_ids"),
        (["engine.mask_token_id=2"], "mask_token_id"),
        (["benchmark.prompts.num_prompts=0"], "num_prompts=0"),
        (["data=jsonl", "data.train.path=nowhere.jsonl", "data.validation.path=nowhere.jsonl"], "nowhere.jsonl"),
        (["target.model=/no/such/folder"], "/no/such/folder"),
        (["stages=report", "report.runs=[no_such_run]"], "no_such_run"),
    ],
)
def test_a_users_mistake_is_one_line_without_a_stack_trace(tmp_path: Path, overrides: list[str], says: str) -> None:
    done = call(tmp_path, *overrides, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    error = done.stderr[done.stderr.index("error:") :]
    assert says in error
