"""A drafter's way out and back in, through the pipeline: trained, exported, imported, measured, exported again."""

import json
from pathlib import Path

import pytest
import torch
from layouts import written
from safetensors.torch import load_file
from test_smoke import call

from dspark_lab.report.metrics_log import read_metrics
from dspark_lab.report.results import read_results

pytestmark = pytest.mark.slow

SMALL = ["data.train.num_prompts=40", "data.validation.num_prompts=8", "benchmark.prompts.num_prompts=8",
         "evaluate.mode=replay", "export.dtype=float32"]  # fmt: skip
DRAFTERS = {
    "eagle3": ["drafter=eagle3", "data.draft_vocab_size=256", "drafter.feature_norm=joint"],
    "dspark": ["drafter=dspark", "drafter.window={tokens:64,origin:anchor,causal:true,full_layers:[]}"],
}


def acceptance(run: Path) -> float:
    (found,) = (m.value for m in read_results(run).metrics if m.name == "acceptance_length")
    assert found is not None
    return found


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_exported_drafter_comes_back_as_it_was(drafter: str, tmp_path: Path) -> None:
    options = [*SMALL, *DRAFTERS[drafter], "trainer.max_steps=20", "trainer.log_every_steps=1"]
    call(tmp_path, *options, "run.name=trained")
    trained, imported = tmp_path / "runs" / "trained", tmp_path / "runs" / "imported"
    card = json.loads((trained / "export" / "run_card.json").read_text())
    assert card["checkpoint"] == "best, step 20"
    assert card["data"]["num_samples"] == 40
    assert card["target"]["fingerprint"].startswith("files-")
    assert f"{acceptance(trained):.2f} [" in (trained / "export" / "README.md").read_text()

    source = f"drafter.from_pretrained={trained / 'export'}"
    printed = call(tmp_path, *options, source, "stages=[evaluate,export]", "run.name=imported").stdout
    assert "speculators format" in printed
    assert acceptance(imported) == acceptance(trained)
    ours, theirs = (load_file(run / "export" / "model.safetensors") for run in (trained, imported))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (trained / "export" / "config.json").read_text() == (imported / "export" / "config.json").read_text()
    card = json.loads((imported / "export" / "run_card.json").read_text())
    assert card["imported_from"] == str(trained / "export")

    # A conversion needs no answers and no states.
    call(tmp_path, *options, source, "stages=export", "run.name=converted", f"home={tmp_path / 'empty'}")
    converted = load_file(tmp_path / "runs" / "converted" / "export" / "model.safetensors")
    assert all(torch.equal(ours[name], converted[name]) for name in ours)

    call(tmp_path, *options, source, "stages=train", "run.name=tuned", "trainer.max_steps=1")
    first = {run: read_metrics(tmp_path / "runs" / run)[0]["train/loss"] for run in ("trained", "tuned")}
    assert first["tuned"] < first["trained"]  # of the same batch


def test_a_checkpoint_of_another_target_is_one_line_without_a_stack_trace(tmp_path: Path) -> None:
    written("z-lab", tmp_path / "zlab")  # of another target
    done = call(
        tmp_path, "drafter=dflash", f"drafter.from_pretrained={tmp_path / 'zlab'}", "stages=export", check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "made for another target: hidden_size: 16 in the checkpoint, 128 of target tiny" in " ".join(
        done.stderr.split()
    )
