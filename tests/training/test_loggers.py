"""The optional loggers: a CSV of each part of a run, and W&B that stays offline without a key."""

from pathlib import Path

import pytest

from dspark_lab.training.loggers import csv_logger, finish_wandb, wandb_logger


def test_csv_of_a_resumed_part_does_not_touch_the_first(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        logger = csv_logger(run_dir=tmp_path, run_name="r")
        logger.log_metrics({"train/loss": value}, step=0)
        logger.finalize("success")
    written = [file.read_text() for file in sorted(tmp_path.glob("csv/version_*/metrics.csv"))]
    assert ["1.0" in written[0], "2.0" in written[1]] == [True, True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_is_offline_without_a_key_and_ends_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    logger = wandb_logger(run_dir=tmp_path, run_name="r", project="p", entity=None, group=None)
    logger.log_hyperparams({"drafter": {"num_layers": 2}})
    logger.log_metrics({"train/loss": 1.0}, step=0)
    assert wandb.run is not None
    finish_wandb(failed=False)
    assert wandb.run is None
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
