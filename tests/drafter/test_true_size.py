"""The Kimi-K3 drafter in its true size, without its memory; and how FSDP would share it out."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from true_k3 import true_size

from dspark_lab.checkpoint.description import describe
from dspark_lab.checkpoint.engines import serve_command, unservable
from dspark_lab.checkpoint.speculators import config_of
from dspark_lab.cluster.plan.memory import TrainingPlace, training_memory
from dspark_lab.drafter.base import Drafter
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.plan import size_of
from dspark_lab.training.sharding import shard
from dspark_lab.training.trainer import choose_strategy

ROW_TOKENS = 8192


@pytest.fixture(scope="module")
def true() -> tuple[DictConfig, Drafter]:
    return true_size("kimi_k3_dspark")


@pytest.fixture(scope="module")
def drafter(true: tuple[DictConfig, Drafter]) -> Drafter:
    return true[1]


def test_parameters_and_names(drafter: Drafter) -> None:
    own = sum(parameter.numel() for parameter in drafter.parameters())
    borrowed = drafter.target_head.embedding.numel() + drafter.target_head.lm_head.numel()
    assert own + borrowed == pytest.approx(5e9, rel=0.06)  # "about 5B parameters"
    assert all(tensor.is_meta for tensor in drafter.parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in drafter.named_parameters()}
    assert shapes["fc.weight"] == (7168, 5 * 7168)
    assert shapes["layers.4.self_attn.q_proj.weight"] == (96 * 64, 7168)
    assert shapes["layers.4.self_attn.k_proj.weight"] == (16 * 64, 7168)
    assert shapes["layers.0.mlp.gate_proj.weight"] == (14336, 7168)
    assert shapes["markov_head.markov_w2.weight"] == (163840, 256)
    assert shapes["confidence_head.proj.weight"] == (1, 7168 + 256)


def test_its_export_is_the_published_one(true: tuple[DictConfig, Drafter]) -> None:
    recipe, drafter = true
    description = describe(drafter)
    config = config_of(
        description, verifier="moonshotai/Kimi-K3", architecture=drafter.target.architecture, dtype="bfloat16"
    )
    assert config["aux_hidden_state_layer_ids"] == [24, 48, 72, 88, 92]
    assert (config["block_size"], config["mask_token_id"], config["markov_rank"]) == (8, 163837, 256)
    assert config["sample_from_anchor"] and config["enable_confidence_head"] and config["draft_vocab_size"] == 163840
    layers = config["transformer_layer_config"]
    assert (layers["num_attention_heads"], layers["num_key_value_heads"], layers["head_dim"]) == (96, 16, 64)
    assert (layers["sliding_window"], layers["layer_types"]) == (2048, ["sliding_attention"] * 5)
    assert layers["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert (layers["rms_norm_eps"], layers["max_position_embeddings"]) == (1e-5, 1048576)
    assert unservable(drafter) == []
    command = serve_command(
        description, target="moonshotai/Kimi-K3", folder="DIR", arguments=build(recipe, "export").serve_arguments
    )
    wanted = (
        '{"model": "DIR", "num_speculative_tokens": 8, "method": "dspark", "draft_sample_method": "probabilistic", '
    )
    assert wanted + '"rejection_sample_method": "block"}' in command
    for part in ("--tensor-parallel-size 16", "--max-model-len 1048576", "--kv-cache-dtype fp8", "TOKENSPEED_MLA"):
        assert part in command


@pytest.fixture
def fake_group(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of that many ranks of which only this one exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("fake_group", [4, 8], indirect=True)
def test_fsdp_holds_what_the_plan_says(fake_group: int) -> None:
    config, drafter = true_size("kimi_k3_dspark")
    size = size_of(drafter, row_tokens=ROW_TOKENS, muon=True)
    shard(drafter, init_device_mesh("cpu", (fake_group,)))
    local = 0
    for parameter in drafter.parameters():
        assert isinstance(parameter, DTensor)
        local += parameter.to_local().numel()
    place = TrainingPlace(num_ranks=fake_group, sharded=True, rows_per_batch=1, bf16=True, on_cpu=False)
    held = training_memory(size, place)
    assert 4 * local == pytest.approx(held["drafter's weights"], rel=1e-3)
    optimizer = drafter.recipe.optimizer.build(drafter)
    states = {"muon": 1, "adamw": 2}  # tensors of each parameter
    per_rank = sum(
        4 * states[group["kind"]] * parameter.to_local().numel()
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    assert per_rank == pytest.approx(held["optimizer"], rel=1e-3)
    whole = training_memory(
        size, TrainingPlace(num_ranks=fake_group, sharded=False, rows_per_batch=1, bf16=True, on_cpu=False)
    )
    assert sum(held.values()) < sum(whole.values()) < config.hardware.memory_bytes


@pytest.mark.parametrize("fake_group", [4, 8], indirect=True)
def test_ddp_holds_and_sends_the_drafters_own_parameters_alone(
    true: tuple[DictConfig, Drafter], fake_group: int
) -> None:
    """The wrapper that training makes, but for its first broadcast, which needs values."""
    config, drafter = true
    strategy = choose_strategy("ddp", num_ranks=fake_group)
    assert isinstance(strategy, DDPStrategy)
    wrapped = DistributedDataParallel(drafter, init_sync=False, **strategy._ddp_kwargs)
    told = wrapped._get_ddp_logging_data()
    place = TrainingPlace(num_ranks=fake_group, sharded=False, rows_per_batch=1, bf16=True, on_cpu=False)
    held = training_memory(size_of(drafter, row_tokens=ROW_TOKENS, muon=True), place)
    assert told["world_size"] == fake_group
    assert told["total_parameter_size_bytes"] == held["gradients"] == held["drafter's weights"]
    assert sum(map(int, told["bucket_sizes"].split(", "))) == held["gradients"]
    assert told["gradient_as_bucket_view"]  # else the plan's gradients would be held twice
    assert sum(held.values()) < config.hardware.memory_bytes
    assert not wrapped.will_sync_module_buffers()
    owned = {id(tensor) for tensor in (*wrapped.parameters(), *wrapped.buffers())}
    borrowed = drafter.target_head
    assert not owned & {id(borrowed.embedding), id(borrowed.norm_weight), id(borrowed.lm_head), id(drafter.draft_rows)}
