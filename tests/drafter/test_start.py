"""A block drafter that starts as the target's own last layers."""

import pytest
import torch
from tiny_world import SPEC, build
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.start import start_from_target


def layers(*, number: int = 4, intermediate_size: int = SPEC.intermediate_size) -> list[nn.Module]:
    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=SPEC.hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=SPEC.num_attention_heads,
        num_key_value_heads=SPEC.num_key_value_heads,
        head_dim=SPEC.head_dim,
        vocab_size=SPEC.vocab_size,
    )
    made = [LlamaDecoderLayer(config, layer_idx=index) for index in range(number)]
    for layer in made:
        nn.init.normal_(layer.input_layernorm.weight, mean=1.0, std=0.2)
    return made


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_it_has_the_last_layers_and_reads_the_newest_state(name: str) -> None:
    drafter, target = build(name), layers()
    assert isinstance(drafter, BlockDrafter)
    before = drafter.layers[0].self_attn.q_norm.weight.clone()
    start_from_target(drafter, target)
    for own, theirs in zip(drafter.layers, target[-2:], strict=True):
        for key, value in theirs.state_dict().items():
            assert torch.equal(own.state_dict()[key], value), key
    assert torch.equal(drafter.layers[0].self_attn.q_norm.weight, before)
    states = torch.randn(3, len(SPEC.layer_ids), SPEC.hidden_size)
    assert torch.equal(drafter.fc(drafter.features(states)), states[:, -1])
    assert torch.equal(drafter.hidden_norm.weight, target[-2].input_layernorm.weight)  # pyright: ignore


@pytest.mark.parametrize(
    ("name", "target", "says"),
    [
        ("eagle3", layers(), "Eagle3's layers are not shaped like a target's"),
        ("dspark", layers(number=1), r"the target has 1 layers, drafter\.num_layers=2"),
        (
            "dspark",
            layers(intermediate_size=24),
            r"mlp\.gate_proj\.weight has \(20, 16\) in the drafter and \(24, 16\)",
        ),
    ],
)
def test_what_cannot_start_so_is_refused(name: str, target: list[nn.Module], says: str) -> None:
    with pytest.raises(ValueError, match=rf"drafter\.from_pretrained=target.*{says}"):
        start_from_target(build(name), target)
