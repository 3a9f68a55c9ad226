"""What a real vLLM accepts of our exports: the very tokens that ``propose`` here would have accepted, step by step.

Target and drafter in fp32 there and here, the drafter from the exported (bf16-rounded) folder.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from test_smoke import call

from dspark_lab.report.results import read_results

try:
    import vllm  # pyright: ignore[reportMissingImports]
except ImportError:
    vllm = None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(vllm is None, reason="vllm is not installed: make test-services"),
]

TRAINED = ["serve.dtype=float32", "serve.num_prompts=12", "evaluate.max_new_tokens=60"]
STAGES = "stages=[regenerate,capture,train,export,serve]"
WINDOW = "drafter.window={tokens:24,origin:query,causal:true,full_layers:[]}"
LONGER = "trainer.max_steps=200"  # until more than the first draft token is accepted
CASES = {
    "eagle3": ["drafter=eagle3", "trainer.max_steps=40", "data.draft_vocab_size=512", "drafter.feature_norm=joint"],
    "dflash": ["drafter=dflash", LONGER],
    "dflash with a window shorter than the context": ["drafter=dflash", LONGER, WINDOW],
    "dspark": ["drafter=dspark", LONGER],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers and states are shared by all drafters."""
    return tmp_path_factory.mktemp("serve")


def gate(folder: Path, name: str, *overrides: str) -> tuple[dict[str, Any], str]:
    """The gate's record and what was printed."""
    printed = call(folder, *TRAINED, *overrides, f"run.name={name}").stdout
    return json.loads((folder / "runs" / name / "serve.json").read_text()), printed


@pytest.mark.parametrize("case", CASES)
def test_vllm_takes_the_very_steps_of_our_own_decoding(folder: Path, case: str) -> None:
    name = case.replace(" ", "-")
    found, printed = gate(folder, name, *CASES[case], STAGES)
    assert found["mismatches"] == []
    for ours, served in zip(found["ours"], found["served"], strict=True):
        assert [(s["position"], s["num_accepted"]) for s in ours["steps"]] == [
            (s["position"], s["num_accepted"]) for s in served["steps"]
        ]
    assert found["counters"]["drafts"] >= 200
    assert sum(found["counters"]["accepted_at"]) == found["counters"]["accepted_tokens"]
    assert found["counters"]["accepted_at"][1] > 0
    assert "serve: agree: " in printed and "12 of 12 greedy answers are the target's own" in printed

    metrics = {entry.name: entry for entry in read_results(folder / "runs" / name).metrics}
    assert metrics["served_acceptance_length"].value == metrics["exported_acceptance_length"].value
    assert metrics["served_agreement"].value == 1.0 and metrics["served_mismatch_rate"].value == 0.0
    assert metrics["served_acceptance_length"].setting["engine"].startswith("vllm")
    # Interpreted kernels say nothing about speed.
    assert (metrics["served_tokens_per_s"].value is None) == (case == "dspark")
