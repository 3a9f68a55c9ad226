"""A sweep through the command line: what its jobs share, what a second one skips, and what becomes of a job that fails."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from dspark_lab.__main__ import main
from dspark_lab.report.collect import collect
from dspark_lab.report.jobs import read_jobs
from dspark_lab.report.recompute import recompute

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STAGES = "stages=[regenerate,capture,train,evaluate]"
SMALL = ["+experiment=smoke", "trainer.max_steps=2", "data.num_workers=0",
         "data.train.num_prompts=12", "data.validation.num_prompts=2", "benchmark.prompts.num_prompts=4",
         "callbacks.replay.num_conversations=1", "evaluate.mode=replay", "data.max_new_tokens=40"]  # fmt: skip


def sweep(folder: Path, *overrides: str) -> int:
    """Exit code of the command, in this process: importing everything anew would take longer than the jobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPARK_LAB_HOME", str(folder / "home"))
        patch.setattr(sys, "argv", ["dspark_lab", *SMALL, f"run.root={folder / 'runs'}", *overrides])
        try:
            main()
        except SystemExit as left:
            return int(left.code or 0)
    return 0


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    assert sweep(folder, "+sweep=drafters", STAGES) == 0
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


def test_a_second_sweep_plans_nothing_and_skips_what_is_done(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(swept, "+sweep=drafters", STAGES, "sweep.dry=true", "trainer.max_steps=3") == 0
    planned = capsys.readouterr().out
    assert planned.count("answers: 18 there, 0 to make") == planned.count("states: 18 there, 0 to make") == 9
    assert planned.count("training: 2 of 3 steps there") == 9
    assert sweep(swept, "+sweep=drafters", STAGES) == 0
    assert capsys.readouterr().out.count("skipped, this job was done at") == 9


def test_a_job_that_fails_is_named_and_the_others_go_on(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(swept, "hydra.mode=MULTIRUN", "drafter=dspark", "seed=1", "stages=evaluate",
                 "evaluate.num_draft_tokens=-1,2,3") == 1  # fmt: skip
    said = capsys.readouterr().err
    assert "Traceback" not in said and said.count("error: job 0 ") == 1
    assert [record.error is None for record in read_jobs(swept / "runs")][-3:] == [False, True, True]
    found = collect([swept / "runs"])
    (failed,) = found.problems
    assert (
        failed.startswith("job ") and "evaluate.num_draft_tokens=-1" in failed and "num_draft_tokens=-1 but" in failed
    )
    widths = {metric.setting["num_draft_tokens"] for run in found.runs for metric in run.results.metrics
              if metric.name == "acceptance_length" and (run.drafter, run.results.run.seed) == ("dspark", 1)}  # fmt: skip
    assert widths == {2, 3, 8}, "the jobs of one run share its checkpoint, and each result stays"
    for run in found.runs:
        again = recompute(run)
        assert again.different == () and "acceptance_length" in {entry.name for entry in again.equal}
