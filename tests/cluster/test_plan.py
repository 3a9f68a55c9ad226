"""The plan: arithmetic that must come out as published facts do, and refusals that name the number that breaks."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerators import accelerator
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dspark_lab.cluster.plan import make_plan
from dspark_lab.cluster.plan.flow import States
from dspark_lab.cluster.plan.job import Assumptions, Job
from dspark_lab.cluster.slurm import Engine, Work
from dspark_lab.configs import config_folder
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.plan import job_of, spec_of_facts

K3_CLUSTER = {"num_sets": 1, "nodes_per_set": 2, "gpus_per_node": 4, "storage": {"segment_bytes": 32 * 2**30}}


def job(*overrides: str, cluster: dict[str, Any] | None = None) -> Job:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", list(overrides))
    choices = {"store": "mooncake", "optimizer": "muon", "engine": "vllm", "cluster": "slurm"}
    OmegaConf.set_struct(config, False)
    config.cluster = cluster or K3_CLUSTER
    spec = spec_of_facts(config)
    assert spec is not None
    parts: Any = SimpleNamespace(config=config, corpus=build(config, "data"), info=SimpleNamespace(choices=choices))
    return job_of(parts, spec)


@pytest.fixture(scope="module")
def k3() -> Job:
    return job("+experiment=kimi_k3_dspark")


def assuming(given: Job, **changes: Any) -> Job:
    return replace(given, assumed=Assumptions(**{**vars(given.assumed), **changes}))


def test_two_serving_nodes_follow_from_bytes_and_the_third_from_the_two_rates(k3: Job) -> None:
    plan = make_plan(k3)
    assert not plan.impossible
    assert [node.num_gpus for node in plan.nodes] == [4, 4, 4]
    assert "mooncake_master" in plan.nodes[0].does and "headless" in " ".join(plan.nodes[1].does)
    assert plan.nodes[2].does == ("trainer ranks 0 to 3",)
    assert (plan.figures["serving_gpus"], plan.figures["serving_nodes"]) == (8, 2)
    # Stated rates alone decide about the third: at the rate that is told, the answer flips.
    flip = plan.figures["flip_capture_tokens_per_s"]
    assert isinstance(flip, float) and flip > 22_000
    for rate, needed in ((22_000, 1), (0.99 * flip, 1), (1.01 * flip, 2)):
        assert make_plan(assuming(k3, capture_tokens_per_s=rate)).figures["training_nodes_needed"] == needed
    slow = assuming(k3, training_flops_share=k3.assumed.training_flops_share * 22_000 / flip * 0.99)
    assert make_plan(slow).figures["training_nodes_needed"] == 2
    assert make_plan(slow).figures["bottleneck"] == "training"


def test_the_recipes_bytes(k3: Job) -> None:
    figures = make_plan(k3).figures
    assert figures["token_bytes"] == 86_016
    assert figures["row_bytes"] == pytest.approx(0.70e9, rel=0.01)
    assert figures["samples_in_flight"] == 43  # "about 40"
    assert States(num_layers=5, hidden_size=7168, number_bytes=2).sample_bytes(65_536) / 2**30 == pytest.approx(
        5.25, rel=1e-3
    )
    assert figures["epoch_steps"] == 25_000
    assert figures["exchanged_bytes_per_step"] == 2 * 3 / 4 * 4 * k3.size.num_parameters
    told = {line.name: line for line in make_plan(k3).lines}["each rank sends"]
    assert "links of 72 GPUs" in told.because and "ms at full speed" in told.told


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda k3: assuming(k3, longest_sample_tokens=65_536), r"65,536 tokens has 5\.25 GiB .* buffer of 4\.00 GiB"),
        (lambda k3: replace(k3, accumulate=64), r"step of 256 rows holds 168\.0 GiB .* 32\.0 GiB is 25\.6 GiB"),
        (
            lambda k3: replace(k3, trainer=replace(k3.trainer, rows_per_batch=32)),
            r"training takes \d+\.\d GB on a GPU of 298\.0 GB",
        ),
        (lambda k3: replace(k3, hardware=accelerator("h100")), r"does not fit into the 8 GPUs that h100 links"),
        (lambda k3: replace(k3, gpus_per_set=4), r"takes 8 GPUs of 298 GB, a set has 4: raise .* to 2 nodes of 4"),
    ],
)
def test_an_impossible_plan_names_the_number_that_breaks(k3: Job, change: Callable[[Job], Job], says: str) -> None:
    told = make_plan(change(k3)).impossible
    assert any(re.search(says, entry) for entry in told), told


def test_more_sets_keep_a_training_node_busier_until_it_is_full(k3: Job) -> None:
    one, nine = (make_plan(replace(k3, num_sets=number)) for number in (1, 9))
    assert (one.figures["bottleneck"], nine.figures["bottleneck"]) == ("capture", "transfers")
    faster = make_plan(assuming(replace(k3, num_sets=9), client_bytes_per_s=1e10))
    assert faster.figures["bottleneck"] == "training"
    assert nine.figures["training_nodes_needed"] == 2
    assert len(nine.nodes) == 9 * 2 + 1


@pytest.mark.parametrize("drafter", ["dspark", "dflash", "eagle3"])
def test_the_sisters_can_be_planned(drafter: str) -> None:
    plan = make_plan(job(f"+experiment=kimi_k3_{drafter}"))
    assert not plan.impossible
    local = {"num_sets": 4, "nodes_per_set": 1, "gpus_per_node": 8, "storage": {"segment_bytes": 160 * 2**30 // 4}}
    plan = make_plan(replace(job(f"+experiment=qwen3_8b_{drafter}", cluster=local), one_machine=True))
    assert not plan.impossible and len(plan.nodes) == 1
    assert json.dumps(plan.to_json())


def test_the_job_is_the_recipes() -> None:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", ["+experiment=kimi_k3_dspark"])
    engine = Engine(
        model="K3", revision=None, layer_ids=(24, 48, 72, 88, 92, 93), dtype="bfloat16", answers=True, captures=True
    )
    work = Work(
        name="k3", folder=Path("runs/k3"), arguments=(), before=(), train=True, after=(), num_nodes=config.trainer.num_nodes,
        ranks_per_node=config.trainer.devices, engine=engine, stores_in_mooncake=True,
    )  # fmt: skip
    job = build(config, "cluster").render(work)
    for part in (
        "#SBATCH --nodes=3", "#SBATCH --gpus-per-node=4", "--tensor-parallel-size 8", "--enable-expert-parallel",
        "--headless", "--max-model-len 8193", "--max-num-seqs 64", "--max-num-batched-tokens 32768", "--nnodes 2",
        "-rpc_thread_num=8", "-global_segment_size=34359738368", "-enable_disk_eviction=false",
        "export NCCL_MNNVL_ENABLE=1", "export VLLM_ENGINE_READY_TIMEOUT_S=3600", "[24, 48, 72, 88, 92, 93]",
    ):  # fmt: skip
        assert part in job, part
