"""The optional loggers: a CSV of each part of a run, and W&B that stays offline without a key or a server."""

import socket
from pathlib import Path

import pytest
from synthetic_runs import make_run

from dspark_lab.report.collect import read_run
from dspark_lab.report.tidy import wandb_rows
from dspark_lab.report.wandb_record import record
from dspark_lab.training.loggers import LoggedJob, csv_logger, finish_wandb, wandb_logger


def job(folder: Path, name: str = "r") -> LoggedJob:
    return LoggedJob(folder, name, experiment="smoke", job_type="train", tags=("drafter=dspark",))


def started(folder: Path, name: str = "r") -> None:
    logger = wandb_logger(job=job(folder, name), project="p", entity=None, group=None, init_timeout_s=2.0)
    logger.log_hyperparams({"drafter": {"num_layers": 2}, "seed": 3})
    logger.log_metrics({"train/loss": 1.0}, step=0)


def test_csv_of_a_resumed_part_does_not_touch_the_first(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        logger = csv_logger(job=job(tmp_path))
        logger.log_metrics({"train/loss": value}, step=0)
        logger.finalize("success")
    written = [file.read_text() for file in sorted(tmp_path.glob("csv/version_*/metrics.csv"))]
    assert ["1.0" in written[0], "2.0" in written[1]] == [True, True]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_job_is_one_offline_run_with_what_was_found_out(tmp_path: Path, offline: None) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    run = make_run(tmp_path / "dspark", "dspark", seed=3)
    for name in ("one", "two"):
        started(tmp_path / name, name)
        assert wandb.run is not None
        assert (wandb.run.id, wandb.run.group, wandb.run.job_type) == (name, "smoke", "train")
        assert wandb.run.tags == ("drafter=dspark",) and wandb.run.offline
        record(read_run(run), wandb.run)
        finish_wandb(failed=name == "two")
        assert wandb.run is None
        assert len(list((tmp_path / name).glob("wandb/offline-run-*/*.wandb"))) == 1
    assert list((tmp_path / "one").glob("wandb/offline-run-*/files/media/**/*.html")), "the examples"
    rows = {(row["metric"], row["origin"]): row for row in wandb_rows([tmp_path / "one"])}
    for origin in ("measured", "replayed"):
        length, row = read_run(run).metric("acceptance_length", origin=origin), rows["acceptance_length", origin]
        assert length is not None and row["value"] == pytest.approx(length.value)
        assert (row["unit"], row["drafter"], row["seed"]) == ("tokens/step", "dspark", 3)
    assert rows["train/loss", None]["value"] == 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_server_that_does_not_answer_leaves_the_run_offline(
    tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes connections, says nothing
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        started(tmp_path)
    assert wandb.run is not None and wandb.run.offline
    finish_wandb(failed=False)
    assert "W&B does not answer" in capsys.readouterr().out
    monkeypatch.delenv("WANDB_MODE")
