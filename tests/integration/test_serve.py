"""What a real vLLM accepts of our exports: the very tokens that ``propose`` here would have accepted, step by step.

Target and drafter in fp32 there and here, the drafter from the exported (bf16-rounded) folder.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_smoke import call

from dspark_lab.checkpoint.engines import cpu_faults
from dspark_lab.report.results import read_results

try:
    import vllm  # pyright: ignore[reportMissingImports]
except ImportError:
    vllm = None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.gate,
    pytest.mark.vllm,
    pytest.mark.skipif(vllm is None, reason="vllm is not installed: make test-services"),
]

TRAINED = ["serve.dtype=float32", "serve.num_prompts=12", "evaluate.max_new_tokens=60"]
STAGES = "stages=[regenerate,capture,train,export,serve]"
WINDOW = "drafter.window={tokens:24,origin:query,causal:true,full_layers:[]}"
# Until more than the first draft token is accepted; of one layer, as vLLM's CPU engine errs with more (last test).
BLOCKS = ["trainer.max_steps=200", "drafter.num_layers=1"]
CASES = {
    "eagle3": ["drafter=eagle3", "trainer.max_steps=40", "data.draft_vocab_size=512", "drafter.feature_norm=joint"],
    "dflash": ["drafter=dflash", *BLOCKS],
    "dflash with a window shorter than the context": ["drafter=dflash", *BLOCKS, WINDOW],
    "dflash2": ["drafter=dflash2", *BLOCKS],
    "dspark": ["drafter=dspark", *BLOCKS],
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
    assert (metrics["served_tokens_per_s"].value is None) == (case in ("dflash2", "dspark"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the CPU engine")
def test_the_fault_of_the_cpu_engine_is_still_there() -> None:
    """Where this fails, ``cpu_faults`` and the one layer of the cases above can go."""
    from vllm import _custom_ops as ops  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    current_platform.import_kernels()
    keys, weights = torch.randn(2, 3, 32), torch.tensor([1.0, 2.0])[:, None].expand(2, 32).contiguous()
    normed = torch.empty_like(keys)
    ops.rms_norm(normed, keys, weights, 1e-6)  # as its DFlash does: one weight for each layer
    expected = torch.nn.functional.rms_norm(keys, (32,), eps=1e-6)
    assert torch.allclose(normed[1], expected[1], atol=1e-4), "each layer has its own weight now: see cpu_faults"
    assert cpu_faults("dflash", {"num_layers": 2}) != [] == cpu_faults("dflash", {"num_layers": 1})
