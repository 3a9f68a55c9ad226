"""A sweep through the command line: what its jobs share, what a second one skips, and what becomes of a job that fails."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dspark_lab.report.collect import collect
from dspark_lab.report.jobs import read_jobs

pytestmark = pytest.mark.slow
SMALL = ["+experiment=smoke", "stages=[regenerate,capture,train,evaluate]", "trainer.max_steps=2", "data.num_workers=0",
         "data.train.num_prompts=12", "data.validation.num_prompts=2", "benchmark.prompts.num_prompts=4",
         "callbacks.replay.num_conversations=1", "evaluate.mode=replay", "data.max_new_tokens=40"]  # fmt: skip


def sweep(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DSPARK_LAB_HOME": str(folder / "home"), "COLUMNS": "200"}
    words = [sys.executable, "-m", "dspark_lab", *SMALL, f"run.root={folder / 'runs'}", *overrides]
    return subprocess.run(words, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    done = sweep(folder, "+sweep=drafters")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


def test_nine_jobs_cost_one_capture(swept: Path) -> None:
    runs = collect([swept / "runs"]).runs
    assert Counter(run.drafter for run in runs) == {"eagle3": 3, "dflash": 3, "dspark": 3}
    assert {run.results.run.seed for run in runs} == {1, 2, 3}
    stages = [stage for run in runs for stage in run.results.stages]
    captured = [stage.events["captured"] for stage in stages if stage.name == "capture"]
    written = [stage.events["regenerated"] for stage in stages if stage.name == "regenerate"]
    assert sorted(captured)[:8] == sorted(written)[:8] == [0] * 8 and max(captured) == max(written) == 18
    assert not any("+sweep" in run.results.run.command for run in runs), "a job's command makes that job alone"


def test_a_second_sweep_plans_nothing_and_skips_what_is_done(swept: Path) -> None:
    planned = sweep(swept, "+sweep=drafters", "sweep.dry=true", "trainer.max_steps=3").stdout
    assert planned.count("answers: 18 there, 0 to make") == planned.count("states: 18 there, 0 to make") == 9
    assert planned.count("training: 2 of 3 steps there") == 9
    again = sweep(swept, "+sweep=drafters").stdout
    assert again.count("skipped, this job was done at") == 9


def test_a_job_that_fails_is_named_and_the_others_go_on(swept: Path) -> None:
    done = sweep(swept, "-m", "drafter=dspark", "seed=1", "stages=evaluate", "evaluate.num_draft_tokens=-1,2,3")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert [record.error is None for record in read_jobs(swept / "runs")][-3:] == [False, True, True]
    (failed,) = (problem for problem in collect([swept / "runs"]).problems if "num_draft_tokens=-1" in problem)
    assert failed.startswith("job drafter=dspark")
    widths = {metric.setting["num_draft_tokens"] for run in collect([swept / "runs"]).runs for metric in run.results.metrics
              if metric.name == "acceptance_length" and run.drafter == "dspark"}  # fmt: skip
    assert widths == {2, 3, 8}, "the jobs of one run share its checkpoint, and each result stays"
