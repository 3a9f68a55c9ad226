import json
import subprocess
import sys

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from dspark_lab.report.lightning_logger import JsonLinesLogger
from dspark_lab.report.metrics_log import METRICS_FILE, MetricsLog, curve, read_metrics


def test_lines_are_on_disk_as_soon_as_written(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"train/loss": 2.5, "tokens": 64}, step=1)
    (line,) = read_metrics(tmp_path)  # the log is still open
    assert (line["step"], line["train/loss"], line["tokens"]) == (1, 2.5, 64)
    assert line["time_s"] >= 0
    log.close()


def test_sigkill_loses_nothing_that_was_written(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from dspark_lab.report.metrics_log import MetricsLog\n"
        "log = MetricsLog(Path(sys.argv[1]))\n"
        "for step in range(100): log.write({'train/loss': step}, step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    assert [line["train/loss"] for line in read_metrics(tmp_path)] == list(range(100))


def test_torn_last_line_is_ignored_then_cut_off(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1, "time_s": 7.0, "train/loss": 2}\n{"step": 2, "time')
    assert len(read_metrics(tmp_path)) == 1
    log = MetricsLog(tmp_path)
    log.write({"train/loss": 1}, step=2)
    log.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert read_metrics(tmp_path)[1]["time_s"] >= 7.0, "the clock goes on where the earlier part stopped"


def test_broken_line_elsewhere_is_named(tmp_path):
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: broken JSON"):
        read_metrics(tmp_path)


def test_not_a_number_becomes_null(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"train/loss": float("nan"), "val/loss": float("inf"), "lr": torch.tensor(0.5)}, step=1)
    log.close()
    (line,) = (json.loads(text) for text in (tmp_path / METRICS_FILE).read_text().splitlines())
    assert (line["train/loss"], line["val/loss"], line["lr"]) == (None, None, 0.5)


def test_curve_carries_tokens_and_drops_superseded_points():
    lines = [
        {"step": 1, "time_s": 1.0, "tokens": 10, "train/loss": 5.0},
        {"step": 2, "time_s": 2.0, "tokens": 20, "train/loss": 4.0},
        {"step": 2, "time_s": 2.5, "val/loss": 9.0},
        {"step": 3, "time_s": 3.0, "tokens": 30, "train/loss": 3.5},  # killed here; the checkpoint was of step 1
        {"step": 2, "time_s": 4.0, "tokens": 20, "train/loss": 4.1},
        {"step": 3, "time_s": 5.0, "tokens": 30, "train/loss": None},
    ]
    loss = curve(lines, "train/loss")
    assert loss is not None
    assert (loss.step, loss.time_s, loss.tokens, loss.value) == ((1, 2), (1.0, 4.0), (10, 20), (5.0, 4.1))
    validation = curve(lines, "val/loss")
    assert validation is not None and validation.tokens == (20,)
    assert curve(lines, "val/acceptance_length") is None
    bare = curve([{"step": 1, "time_s": 1.0, "lr": 0.1}], "lr")
    assert bare is not None and bare.tokens == ()


class _Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        self.log("tokens", 8.0 * (index + 1))
        loss = self.layer(batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning 2.6 with torch 2.13
def test_lightning_writes_a_line_per_logged_step(tmp_path):
    logger = JsonLinesLogger(directory=tmp_path)
    assert not (tmp_path / METRICS_FILE).exists()
    trainer = L.Trainer(
        max_epochs=1,
        logger=logger,
        log_every_n_steps=1,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Line(), DataLoader(torch.ones(3, 1), batch_size=1))  # type: ignore[arg-type]
    loss = curve(read_metrics(tmp_path), "train/loss")
    assert loss is not None
    assert (len(loss.value), loss.tokens) == (3, (8, 16, 24))
    assert loss.value[0] > loss.value[2]


def test_logger_refuses_a_wrong_type():
    with pytest.raises(ValueError, match="directory"):
        JsonLinesLogger(directory=3)  # type: ignore[arg-type]
