"""What a real vLLM accepts of our exports: the very tokens that ``propose`` here would have accepted, step by step.

Target and drafter in fp32 there and here, the drafter from the exported (bf16-rounded) folder.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_smoke import call

from dspark_lab.checkpoint.engines import cpu_faults, verification_faults
from dspark_lab.cluster.vllm import VllmServer, engine_environment
from dspark_lab.evaluation.engine import ARGUMENTS, DRAFTING_ARGUMENTS
from dspark_lab.hardware.engine import measure_engine_steps
from dspark_lab.hardware.measure import Grid
from dspark_lab.pipeline.profile import num_draft_tokens_of
from dspark_lab.records import Metric
from dspark_lab.report.results import read_results
from dspark_lab.report.served import read_served
from dspark_lab.target.resolve import ASSETS

try:
    import vllm  # pyright: ignore[reportMissingImports]
except ImportError:
    vllm = None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(vllm is None, reason="vllm is not installed: make test-services"),
]

SMALL = ["serve.dtype=float32", "evaluate.max_new_tokens=60", "data.train.num_prompts=200"]
# Until more than the first draft token is accepted; of one layer, as vLLM's CPU engine errs with more (last test).
BLOCKS = ["trainer.max_steps=150", "drafter.num_layers=1"]
CASES = {
    "eagle3": ["drafter=eagle3", "trainer.max_steps=40", "data.draft_vocab_size=512", "drafter.feature_norm=joint"],
    "dflash": ["drafter=dflash", *BLOCKS, "drafter.window={tokens:24,origin:query,causal:true,full_layers:[]}"],
}
# All at once: interpreted kernels cost much a step, little more for several requests.
DSPARK = ["drafter=dspark", *BLOCKS, "serve.num_prompts=8", "serve.concurrency=8", "run.name=dspark"]
TRAIN = "stages=[regenerate,capture,train,export]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers and states are shared by all drafters."""
    return tmp_path_factory.mktemp("serve")


def check_steps(run: Path, printed: str) -> dict[str, Metric]:
    """Greedy decoding in the engine took the very steps of our own; returns the run's metrics."""
    found = json.loads((run / "serve.json").read_text())
    assert found["mismatches"] == []
    for ours, served in zip(found["ours"], found["served"], strict=True):
        assert [(s["position"], s["num_accepted"]) for s in ours["steps"]] == [
            (s["position"], s["num_accepted"]) for s in served["steps"]
        ]
    assert found["counters"]["drafts"] >= 200
    assert sum(found["counters"]["accepted_at"]) == found["counters"]["accepted_tokens"]
    assert found["counters"]["accepted_at"][1] > 0
    number = len(found["ours"])
    assert "serve: agree: " in printed and f"{number} of {number} greedy answers are the target's own" in printed
    metrics = {entry.name: entry for entry in read_results(run).metrics if entry.setting.get("temperature") == 0.0}
    assert metrics["served_acceptance_length"].value == metrics["exported_acceptance_length"].value
    assert metrics["served_agreement"].value == 1.0 and metrics["served_mismatch_rate"].value == 0.0
    assert metrics["served_acceptance_length"].setting["engine"].startswith("vllm")
    return metrics


def test_a_server_that_runs_already_takes_our_steps_and_agrees_when_sampling(folder: Path) -> None:
    """DSpark, greedily and at temperature 1: EAGLE-3 and DFlash are sampled at wrong temperatures on CPUs (last test)."""
    call(folder, *SMALL, *DSPARK, TRAIN)
    run, on_cpu = folder / "runs" / "dspark", not torch.cuda.is_available()
    speculative = {"model": str(run / "export"), "num_speculative_tokens": 8, "method": "dspark"}
    arguments = ["--dtype", "float32", "--max-model-len", "200", "--generation-config", "vllm"]
    arguments += ["--speculative-config", json.dumps(speculative), *ARGUMENTS, *DRAFTING_ARGUMENTS]
    target = str(ASSETS / "tiny")
    with VllmServer(folder=folder, model=target, arguments=arguments, on_cpu=on_cpu, interpret=on_cpu) as server:
        stages = ["stages=[regenerate,serve]", f"serve.endpoint={server.url}"]
        grid = Grid(
            num_requests=(2,), num_tokens=(1,), num_prefill_tokens=(), num_context_tokens=(16,), warmups=0, repeats=1,
            endpoints=(), num_gpus=1,
        )  # fmt: skip
        (step,) = measure_engine_steps(server, grid, num_draft_tokens=8, vocab_size=128, seed=0)
        assert num_draft_tokens_of(server) == 8 and step.num_tokens == 18 and step.repeats >= 3
        sampled_then_greedy = call(folder, "-m", *SMALL, *DSPARK, *stages, "evaluate.temperature=1.0,0.0").stdout
    metrics = check_steps(run, sampled_then_greedy)
    assert (metrics["served_tokens_per_s"].value is None) == on_cpu  # interpreted kernels say nothing about speed
    sampled = {m.name: m.value for m in read_results(run).metrics if m.setting.get("temperature") == 1.0}
    assert sampled["served_agreement"] == 1.0 and sampled["served_acceptance_length"] > 1.1


@pytest.mark.parametrize("drafter", CASES)
def test_vllm_takes_the_very_steps_of_our_own_decoding(folder: Path, drafter: str) -> None:
    overrides = [
        *SMALL,
        *CASES[drafter],
        "serve.num_prompts=12",
        f"serve.concurrency={[1, 4] if drafter == 'dflash' else 1}",
    ]
    printed = call(folder, *overrides, TRAIN.replace("]", ",serve]"), f"run.name={drafter}").stdout
    run = folder / "runs" / drafter
    assert check_steps(run, printed)["served_tokens_per_s"].value
    if drafter == "dflash":
        one, four = read_served(run)
        assert (one.concurrency, four.concurrency) == (1, 4)
        assert one.acceptance_length == pytest.approx(four.acceptance_length, rel=0.01)
        assert one.tokens_per_s_per_user and four.tokens_per_s_per_user and one.time_to_first_token_s


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the CPU engine")
def test_the_older_runner_still_samples_at_temperatures_that_it_never_wrote() -> None:
    """Where this fails, ``pipeline.engine`` need not interpret EAGLE-3 and DFlash with a temperature on CPUs."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl  # pyright: ignore[reportMissingImports]

    current_platform.import_kernels()
    temperatures = torch.full((5,), -1.0)
    _expand_kernel_impl(temperatures, torch.tensor([0.5, 1.0]), torch.tensor([3, 5]), 0, 1, MAX_NUM_TOKENS=8)
    assert temperatures.tolist() == [-1.0] * 5, "expanded to [0.5, 0.5, 0.5, 1, 1] now"


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="by the interpreted kernel, which is the same on GPUs")
def test_block_verification_still_takes_the_coins_that_an_earlier_step_has_seen() -> None:
    """Where this fails, ``verification_faults`` can go."""
    steps = [sys.executable, str(Path(__file__).with_name("block_coins.py"))]
    added = engine_environment(on_cpu=True, interpret=True)
    done = subprocess.run(steps, capture_output=True, text=True, env={**os.environ, **added})
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert {0, 2} == set(first)
    assert [accepted // 2 for accepted in first] == second, "coins of their own in every step now"
    assert verification_faults("block") != [] == verification_faults("token")
