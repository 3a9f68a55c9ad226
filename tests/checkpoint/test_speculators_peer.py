"""What we write, Speculators 0.9.0's own classes load: the same weights, bit by bit, and the same logits."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tiny_target import write_target
from tiny_world import ALL, VOCABULARIES, assert_close, build, document, loss_of, pack
from torch import Tensor, nn
from with_peer import needs_peer, peer

from dspark_lab.checkpoint.description import describe
from dspark_lab.checkpoint.export import write_folder
from dspark_lab.checkpoint.reading import read_checkpoint
from dspark_lab.checkpoint.speculators import config_of, tensors_of
from dspark_lab.checkpoint.warm_start import load_weights
from dspark_lab.drafter.base import Drafter
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.eagle3 import Eagle3

if peer is not None:
    from speculators.config import SpeculatorModelConfig
    from speculators.model import SpeculatorModel
    from speculators.models.dflash import core as dflash_core
    from speculators.models.dflash2 import core as dflash2_core
    from speculators.models.dspark import core as dspark_core
    from speculators.models.eagle3 import core as eagle3_core
pytestmark = [*needs_peer, pytest.mark.filterwarnings("ignore")]  # theirs, about their own configs

WINDOW = {"tokens": 4, "origin": "anchor", "causal": True, "full_layers": ()}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "eagle3-joint": ("eagle3", {"feature_norm": "joint", "norm_before_residual": True, "norm_output": True}),
    "eagle3-layer-qwen3": ("eagle3", {"feature_norm": "layer", "norm_output": True, "qk_norm": True}),
    "eagle3-one-layer": ("eagle3", {"num_layers": 1}),
    "eagle3-window": ("eagle3", {"window": {**WINDOW, "full_layers": (1,)}}),
    "dflash": ("dflash", {}),
    "dflash-anchor-first": ("dflash", {"sample_from_anchor": True}),
    "dflash-window": ("dflash", {"window": {**WINDOW, "causal": False}}),
    "dflash2": ("dflash2", {}),
    "dflash2-window": ("dflash2", {"conv_kernel_size": 3, "window": {**WINDOW, "full_layers": (0,)}}),
    "dspark": ("dspark", {}),
    "dspark-gated": ("dspark", {"markov": "gated"}),
    "dspark-rnn": ("dspark", {"markov": "rnn"}),
    "dspark-no-markov": ("dspark", {"markov": None}),
    "dspark-no-confidence": ("dspark", {"confidence": False}),
    "dspark-bonus-anchor": ("dspark", {"sample_from_anchor": False}),
    "dspark-window": ("dspark", {"window": {**WINDOW, "full_layers": (0,)}}),
    "dspark-window-both-ways": ("dspark", {"window": {**WINDOW, "causal": False}}),
}
# Speculators has DFlash2 with the full vocabulary only.
CASES_AND_VOCABULARIES = [
    (case, vocabulary)
    for case, (name, _) in CASES.items()
    for vocabulary in VOCABULARIES
    if name != "dflash2" or vocabulary == "full"
]
EVERY_CASE = pytest.mark.parametrize(("case", "vocabulary"), CASES_AND_VOCABULARIES)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def made(case: str, vocabulary: str) -> Drafter:
    name, options = CASES[case]
    if name != "eagle3":
        options = {"num_anchors": ALL, **options}
    confidence = {"terms": {"ce": 1.0, "confidence": float(options.get("confidence", True))}}
    loss = loss_of("speculators", **(confidence if name == "dspark" else {}))
    return build(name, vocabulary=vocabulary, loss=loss, **options)


def exported(drafter: Drafter, folder: Path, target: Path, dtype: torch.dtype, *, standalone: bool = False) -> Path:
    config = config_of(
        describe(drafter),
        verifier=str(target),
        architecture="LlamaForCausalLM",
        dtype=str(dtype).removeprefix("torch."),
    )
    tensors = tensors_of(drafter, dtype=dtype, include_target_tensors=standalone)
    write_folder(folder, config=config, tensors=tensors, model_card="", run_card={})
    return folder


def loaded(folder: Path) -> nn.Module:
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    return SpeculatorModel.from_pretrained(folder, config=config)


@EVERY_CASE
def test_weights_are_bit_equal(case: str, vocabulary: str, tmp_path: Path, target: Path):
    drafter = made(case, vocabulary)
    theirs = loaded(exported(drafter, tmp_path / "export", target, torch.bfloat16)).state_dict()
    ours = tensors_of(drafter, dtype=torch.bfloat16, include_target_tensors=True)
    assert ours.keys() == theirs.keys() - {"verifier_lm_head.weight", "verifier_norm.weight"}
    for name, tensor in ours.items():
        assert theirs[name].dtype == tensor.dtype, name
        assert torch.equal(theirs[name], tensor), name


@EVERY_CASE
def test_logits_are_ours_in_fp32(case: str, vocabulary: str, tmp_path: Path, target: Path):
    drafter = made(case, vocabulary)
    model = loaded(exported(drafter, tmp_path / "export", target, torch.float32))
    sample = document("000001111111101", seed=3)
    batch = pack([[sample]], row_tokens=len(sample.token_ids))
    output = drafter(batch)
    expected = drafter.loss_logits(output)[output.supervised]
    if isinstance(drafter, Eagle3):
        steps = logits_seen_by_the_loss(
            eagle3_core, lambda: peer.run_chains(model, drafter, [sample], batch.num_tokens)
        )
        slots, supervised = drafter.chains(batch)
        assert torch.equal(supervised, output.supervised)
        actual = torch.stack([logits[0, slots] for logits in steps], dim=1)
    else:
        assert isinstance(drafter, BlockDrafter)
        core = {"dflash": dflash_core, "dflash2": dflash2_core, "dspark": dspark_core}[CASES[case][0]]
        (logits,) = logits_seen_by_the_loss(core, lambda: peer.run_blocks(model, drafter, batch))
        blocks = logits[0].unflatten(0, (-1, drafter.block_size))
        actual = blocks if drafter.sample_from_anchor else blocks[:, 1:]
    assert_close(actual[output.supervised], expected)


def logits_seen_by_the_loss(core: Any, run: Any) -> list[Tensor]:
    """Their draft logits, [1, slots, V_d] of each call of their loss."""
    seen: list[Tensor] = []
    compute = core.compute_metrics

    def watch(*arguments: Any, **named: Any) -> Any:
        seen.append(arguments[0] if arguments else named["unary_logits"])
        return compute(*arguments, **named)

    with patch.object(core, "compute_metrics", watch), torch.no_grad():
        run()
    return seen


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark"])
def test_a_standalone_file_brings_the_targets_matrices(name: str, tmp_path: Path, target: Path):
    drafter = made(name, "full")
    folder = exported(drafter, tmp_path / "export", target, torch.bfloat16, standalone=True)
    names = read_checkpoint(str(folder)).tensors.keys()
    assert {"embed_tokens.weight", "lm_head.weight"} <= names


@EVERY_CASE
def test_what_speculators_saves_is_read_back(case: str, vocabulary: str, tmp_path: Path, target: Path):
    drafter = made(case, vocabulary)
    model = loaded(exported(drafter, tmp_path / "ours", target, torch.float32))
    model.save_pretrained(tmp_path / "theirs")
    checkpoint = read_checkpoint(str(tmp_path / "theirs"))
    expected, found = describe(drafter), checkpoint.description
    assert found.algorithm == expected.algorithm
    assert found.options == expected.options
    assert found.layers == expected.layers
    assert (found.layer_ids, found.mask_token_id) == (expected.layer_ids, expected.mask_token_id)
    assert torch.equal(checkpoint.vocabulary.draft_to_target, drafter.vocabulary.draft_to_target)
    again = made(case, vocabulary)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    load_weights(again, checkpoint)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
