"""Latent attention against plain loops, in its true size, and where it is refused."""

import math
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from naive_reference import Weights, rms_norm
from tiny_world import LATENT, SPEC, assert_close, build, documents, pack, target_head
from torch import Tensor
from true_k3 import true_size

from dspark_lab.configs import config_folder
from dspark_lab.drafter.attention_kinds import LatentAttention
from dspark_lab.pipeline.build import build as build_node
from dspark_lab.pipeline.export import refuse_unwritable
from dspark_lab.pipeline.plan import size_of
from dspark_lab.records import TargetSample

BLOCK_SIZE = 4
ROWS = (("0110", "1", "00101111"), ("111011",))  # short documents: the loops are slow
HEADS, NOPE, ROPE, VALUE = (LATENT[key] for key in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))


def rotated(x: Tensor, position: int) -> Tensor:
    """Each pair of neighbours as a complex number, turned by its angle."""
    pairs = torch.view_as_complex(x.view(-1, 2))
    angle = position * 100.0 ** (-torch.arange(ROPE // 2, dtype=torch.float64) * 2 / ROPE)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten()


def key_value(w: Weights, place: str, x: Tensor, position: int) -> list[tuple[Tensor, Tensor]]:
    """Of each head."""
    latent, shared = (w[f"{place}.kv_a_proj_with_mqa.weight"] @ x).split([LATENT["kv_lora_rank"], ROPE])
    expanded = w[f"{place}.kv_b_proj.weight"] @ rms_norm(latent, w[f"{place}.kv_a_layernorm.weight"])
    heads = expanded.view(HEADS, NOPE + VALUE)
    return [(torch.cat([head[:NOPE], rotated(shared, position)]), head[NOPE:]) for head in heads]


def attention(w: Weights, place: str, x: Tensor, position: int, visible: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
    query = w[f"{place}.q_b_proj.weight"] @ rms_norm(
        w[f"{place}.q_a_proj.weight"] @ x, w[f"{place}.q_a_layernorm.weight"]
    )
    out = []
    for head, part in enumerate(query.view(HEADS, NOPE + ROPE)):
        turned = torch.cat([part[:NOPE], rotated(part[NOPE:], position)])
        scores = torch.stack([turned @ heads[head][0] for heads in visible]) / math.sqrt(NOPE + ROPE)
        shares = scores.softmax(0)
        out.append(sum((share * heads[head][1] for share, heads in zip(shares, visible, strict=True)), torch.zeros(1)))
    return w[f"{place}.o_proj.weight"] @ torch.cat(out)


def naive_hidden(w: Weights, sample: TargetSample, anchor: int) -> list[Tensor]:
    """Normed hidden state of every slot of the block at ``anchor``."""
    context = []
    for j in range(anchor):
        state = torch.cat([layer.double() for layer in sample.hidden_states[j]])
        context.append(rms_norm(w["fc.weight"] @ state, w["hidden_norm.weight"]))
    ids = [int(sample.token_ids[anchor])] + [SPEC.mask_token_id] * (BLOCK_SIZE - 1)
    x = [target_head().embedding[token].double() for token in ids]
    for layer in (0, 1):
        place = f"layers.{layer}"
        normed = [rms_norm(state, w[f"{place}.input_layernorm.weight"]) for state in x]
        visible = [key_value(w, f"{place}.self_attn", c, j) for j, c in enumerate(context)]
        visible += [key_value(w, f"{place}.self_attn", u, anchor + k) for k, u in enumerate(normed)]
        attended = [attention(w, f"{place}.self_attn", u, anchor + k, visible) for k, u in enumerate(normed)]
        x = [state + added for state, added in zip(x, attended, strict=True)]
        normed = [rms_norm(state, w[f"{place}.post_attention_layernorm.weight"]) for state in x]
        for k, u in enumerate(normed):
            gate, up = w[f"{place}.mlp.gate_proj.weight"] @ u, w[f"{place}.mlp.up_proj.weight"] @ u
            x[k] = x[k] + w[f"{place}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
    return [rms_norm(state, w["norm.weight"]) for state in x]


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_hidden_states_are_the_plain_loops(name: str):
    drafter = build(name, attention=LATENT)
    w: Weights = {key: parameter.detach().double() for key, parameter in drafter.named_parameters()}
    rows = documents(ROWS)
    with torch.no_grad():
        output = drafter(pack(rows))
    expected = []
    for sample in (sample for row in rows for sample in row):
        mask = sample.loss_mask.tolist()
        for anchor in (i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]):
            states = naive_hidden(w, sample, anchor)[1 if name == "dflash" else 0 :]
            for k, state in enumerate(states):
                if anchor + k + 1 >= len(mask) or not all(mask[anchor : anchor + k + 2]):
                    break
                expected.append(state)
    assert len(expected) > 8
    assert_close(output.hidden[output.supervised], torch.stack(expected))


def test_the_true_size_has_its_parameters():
    config, drafter = true_size("kimi_k3_dspark_mla")
    refuse_unwritable(config)
    size, inner = 7168, 14336
    attention = size * 1536 + 1536 + 1536 * 96 * 192 + size * 576 + 512 + 512 * 96 * 256 + 96 * 128 * size
    layer = attention + 3 * size * inner + 2 * size
    heads = 2 * 163840 * 256 + (size + 256 + 1)
    assert sum(p.numel() for p in drafter.parameters()) == 5 * layer + 5 * size * size + 2 * size + heads
    assert all(p.is_meta for p in drafter.parameters())
    assert drafter.num_draft_tokens == 7

    planned = size_of(drafter, row_tokens=8192, muon=True)
    assert planned.num_attention == attention - 1536 - 512
    assert planned.num_key == size * 576 + 512 * 96 * 256


@pytest.mark.parametrize("name", ["eagle3", "dflash2"])
def test_layers_of_another_kind_refuse_it(name: str):
    with pytest.raises(ValueError, match=r"is latent, which only the layers of dflash and dspark can be"):
        build(name, attention=LATENT)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"v_head_dim": 0}, "must be positive"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim even"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_type=llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0}}, "mscale_all_dim"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        LatentAttention(**{**LATENT, **changes})


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["drafter=eagle3"], r"drafter=eagle3: attention with kv_lora_rank is latent"),
        (["drafter=dflash"], r"dflash with latent attention: no engine's format holds it; use drafter=dspark"),
        (["data.draft_vocab_size=32000"], r"set data\.draft_vocab_size=null"),
        (["drafter.markov=gated"], r"set drafter\.markov=vanilla"),
        (["drafter.window={tokens:64,origin:anchor,causal:false,full_layers:[]}"], r"set drafter\.window=null"),
    ],
)
def test_what_the_engine_cannot_hold_is_refused_before_training(overrides: list[str], says: str):
    latent = "{" + ",".join(f"{key}:{value}" for key, value in LATENT.items() if key != "rope_parameters")
    latent += ",rope_parameters:{rope_type:default,rope_theta:100.0}}"
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", ["drafter=dspark", *overrides, f"drafter.attention={latent}"])
    with pytest.raises(ValueError, match=says):
        refuse_unwritable(config)


def test_keys_that_are_missing_are_named():
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", ["drafter=dspark", "drafter.attention={num_heads:4,kv_lora_rank:8}"])
    with pytest.raises(ValueError, match=r"drafter\.attention\.latent\.q_lora_rank"):
        build_node(config, "drafter", without=("from_pretrained",), borrowed=None, recipe=None)
