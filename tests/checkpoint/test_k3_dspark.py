"""vLLM's own format of DSpark with latent attention: read again here, and by vLLM's classes."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_world import LATENT, SPEC, assert_close, build
from torch import nn
from true_k3 import true_size

from dspark_lab.checkpoint import k3_dspark
from dspark_lab.checkpoint.description import describe
from dspark_lab.checkpoint.reading import read_checkpoint
from dspark_lab.checkpoint.speculators import tensors_of
from dspark_lab.checkpoint.warm_start import check_fit, load_weights
from dspark_lab.drafter.base import Drafter
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.mla import rotate_pairs


def config_of(drafter: Drafter) -> dict[str, Any]:
    return k3_dspark.config_of(describe(drafter), dtype="float32")


def exported(drafter: Drafter) -> dict[str, torch.Tensor]:
    return k3_dspark.to_theirs(tensors_of(drafter, dtype=torch.float32, include_target_tensors=False))


def test_it_is_read_as_it_was_written(tmp_path: Path):
    drafter = build("dspark_mla")
    (tmp_path / "config.json").write_text(json.dumps(config_of(drafter)))
    save_file(exported(drafter), tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(str(tmp_path))
    assert checkpoint.format == "vLLM"
    assert checkpoint.description == replace(describe(drafter), num_target_layers=None)

    options = dict(checkpoint.description.options)
    fits: Any = {"algorithm": "dspark", "draft_vocab_size": None, "target": SPEC}
    check_fit(checkpoint, options=options | {"attention": LATENT}, **fits)
    for other in (None, {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope_parameters": {}}):
        with pytest.raises(
            ValueError, match=r"Run with 'drafter\.attention=\{num_heads:3,q_lora_rank:10.*rope_type:def"
        ):
            check_fit(checkpoint, options=options | {"attention": other}, **fits)
    again = build("dspark_mla")
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    load_weights(again, checkpoint)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_a_grouped_checkpoint_is_no_latent_one(tmp_path: Path):
    drafter = build("dspark")
    checkpoint: Any = SimpleNamespace(description=describe(drafter), source="there", format="any")
    with pytest.raises(ValueError, match=r"drafter\.attention says another"):
        check_fit(
            checkpoint,
            algorithm="dspark",
            options={**describe(drafter).options, "attention": LATENT},
            draft_vocab_size=None,
            target=SPEC,
        )


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], nn.Module]]:
    """vLLM's model for a config.json, but for what computes attention on a GPU, which holds no parameters."""
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.models.kimi_k3.nvidia import dspark_mla, mla
    from vllm.transformers_utils.configs.k3_dspark import K3DSparkConfig

    def kernels(**_: Any) -> Any:
        return SimpleNamespace()

    monkeypatch.setattr(mla, "get_attn_backend", lambda *_, **__: SimpleNamespace(get_impl_cls=lambda: kernels))
    monkeypatch.setattr(mla, "get_mla_prefill_backend", lambda _: kernels)
    monkeypatch.setattr(dspark_mla, "get_draft_quant_config", lambda _: None)

    def made(config: dict[str, Any]) -> nn.Module:
        draft = SimpleNamespace(hf_config=K3DSparkConfig.from_dict(config))
        given: Any = SimpleNamespace(
            speculative_config=SimpleNamespace(draft_model_config=draft),
            model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: SPEC.num_layers),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
            cache_config=None,
        )
        with set_current_vllm_config(VllmConfig()):
            return dspark_mla.K3DSparkForCausalLM(vllm_config=given)

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path / 'store'}", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
    yield made
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.mark.slow  # vLLM's imports
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_loads_every_parameter_of_it(served: Callable[[dict[str, Any]], Any]):
    drafter = build("dspark_mla")
    assert isinstance(drafter, BlockDrafter)
    model, tensors = served(config_of(drafter)), exported(drafter)
    found = dict(model.named_parameters())
    assert model.load_weights(iter(tensors.items())) == found.keys()

    for layer in range(2):
        place = f"layers.{layer}.self_attn"
        fused = torch.cat([tensors[f"{place}.{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")])
        assert torch.equal(found[f"model.{place}.fused_qkv_a_proj.weight"], fused)
        for name in ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj"):
            assert torch.equal(found[f"model.{place}.{name}.weight"], tensors[f"{place}.{name}.weight"])
    for name in ("context_proj.weight", "context_norm.weight", "final_norm.weight", "confidence_head.proj.bias"):
        assert torch.equal(found[f"model.{name}"], tensors[name])

    theirs, position = model.model.layers[0].self_attn, torch.tensor([0, 1, 70, 900])
    assert theirs.scale == pytest.approx((LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"]) ** -0.5)
    states = torch.randn(4, 3, LATENT["qk_rope_head_dim"], generator=torch.Generator().manual_seed(0))
    turned, _ = theirs.rotary_emb.forward_native(position, states.flatten(1).clone(), None)
    assert_close(rotate_pairs(states, drafter.rotary(position)).flatten(1), turned, relative=1e-4)

    from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal

    assert dflash_has_any_non_causal(model.config), "slots see their whole block"
    assert [layer + 1 for layer in model.config.target_layer_ids] == list(SPEC.layer_ids)
    assert (model.config.mask_token_id, model.config.sample_from_anchor) == (SPEC.mask_token_id, True)

    _, true = true_size("kimi_k3_dspark_mla")
    with torch.device("meta"):  # its loaders compare shapes
        model, tensors = served(config_of(true)), k3_dspark.to_theirs(true.state_dict())
        assert model.load_weights(iter(tensors.items())) == dict(model.named_parameters()).keys()
    extra = model.model.context_kv_proj.weight.numel()  # once more the projections to latents
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in true.parameters()) + extra
    assert list(model.config.target_layer_ids) == [2, 23, 47, 71, 89]
