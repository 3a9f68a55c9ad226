"""Checkpoints of every known trainer become the drafters they were written from; what does not fit is named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import CASES, NESTED, ZLAB, changed, emptied, made, written
from safetensors.torch import save_file
from tiny_world import SPEC, VOCABULARIES, build, context_of, document, propose
from torch import Tensor

from dspark_lab.checkpoint.description import Description, describe
from dspark_lab.checkpoint.engines import unservable
from dspark_lab.checkpoint.reading import Checkpoint, read_checkpoint
from dspark_lab.checkpoint.speculators import config_of, from_config, tensors_of
from dspark_lab.checkpoint.warm_start import check_fit, load_weights
from dspark_lab.records import Sampling


def shape(found: Description) -> dict[str, Any]:
    fields = (
        "algorithm",
        "options",
        "layer_ids",
        "mask_token_id",
        "hidden_size",
        "layers",
        "vocab_size",
        "draft_vocab_size",
    )
    return {field: getattr(found, field) for field in fields}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_becomes_the_drafter_it_was_written_from(case: str, tmp_path: Path):
    drafter = written(case, tmp_path / "checkpoint")
    checkpoint = read_checkpoint(str(tmp_path / "checkpoint"))
    expected = describe(drafter)
    assert shape(checkpoint.description) == shape(expected)
    size = drafter.vocabulary.size
    check_fit(checkpoint, algorithm=expected.algorithm, options=expected.options, draft_vocab_size=size, target=SPEC)
    again = emptied(made(case))
    load_weights(again, checkpoint)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    sample, num = document("0000011111", seed=5), drafter.num_draft_tokens
    ours, theirs = (
        propose(one, context_of(sample, anchor=7), num_draft_tokens=num, sampling=Sampling())
        for one in (again, drafter)
    )
    assert torch.equal(ours.token_ids, theirs.token_ids)


@pytest.mark.parametrize("case", CASES)
def test_an_imported_drafter_is_re_exported_as_what_it_is(case: str, tmp_path: Path):
    drafter, again = written(case, tmp_path / "checkpoint"), emptied(made(case))
    load_weights(again, read_checkpoint(str(tmp_path / "checkpoint")))
    config = config_of(describe(again), verifier="owner/target", architecture="Any", dtype="float32")
    found = from_config(json.loads(json.dumps(config)))
    assert shape(found) == shape(describe(drafter))
    assert found.verifier == "owner/target"
    tensors = tensors_of(again, dtype=torch.float32, include_target_tensors=False)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensors[name], tensor), name


def test_layer_facts_that_no_key_sets_come_from_the_checkpoint(tmp_path: Path):
    """Published drafters have head counts, epsilon and RoPE of their own; the context stays the target's."""
    other = {
        "num_attention_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps({**ZLAB, **other}))
    save_file({"fc.weight": torch.zeros(16, 48)}, tmp_path / "model.safetensors")
    seen = read_checkpoint(str(tmp_path)).description.layers.seen_by(SPEC)
    assert (seen.num_attention_heads, seen.num_key_value_heads, seen.head_dim) == (2, 2, 4)
    assert seen.rms_norm_eps == 1e-6
    assert seen.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    assert (seen.max_position_embeddings, seen.layer_ids) == (SPEC.max_position_embeddings, SPEC.layer_ids)


def test_rope_scaling_is_written_in_both_spellings(tmp_path: Path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    described = describe(build("dspark"))
    described = replace(described, layers=replace(described.layers, rope_parameters=rope))
    config = config_of(described, verifier="owner/target", architecture="Any", dtype="float32")
    layers = config["transformer_layer_config"]
    assert layers["rope_parameters"] == rope
    assert layers["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert layers["rope_theta"] == 100.0
    assert from_config(config).layers.rope_parameters == rope


def test_eagles_own_head_is_used_kept_and_exported(tmp_path: Path):
    """Its authors train it, so it is not the target's; what the target says is still read off the target's."""
    drafter, file = written("EAGLE", tmp_path / "checkpoint"), tmp_path / "checkpoint" / "pytorch_model.bin"
    head = torch.randn(13, 16, generator=torch.Generator().manual_seed(1))
    torch.save({**torch.load(file), "lm_head.weight": head}, file)
    again = emptied(made("EAGLE"))
    load_weights(again, read_checkpoint(str(tmp_path / "checkpoint")))
    hidden = torch.randn(3, 16)
    assert torch.equal(again.head(hidden, torch.zeros(3)), hidden @ head.T)
    assert torch.equal(again.teacher_logits(hidden), drafter.teacher_logits(hidden))
    moved = again.to(torch.bfloat16)
    assert torch.equal(moved.head(hidden.bfloat16(), torch.zeros(3)), hidden.bfloat16() @ head.bfloat16().T)
    written_out = tensors_of(moved, dtype=torch.bfloat16, include_target_tensors=False)
    assert torch.equal(written_out["lm_head.weight"], head.bfloat16())


@pytest.mark.parametrize(
    ("case", "config", "says"),
    [
        ("z-lab", {"architectures": ["Other"]}, "no speculators_model_type and architecture 'Other'.*Qwen3DSparkModel"),
        ("z-lab", {"speculators_model_type": "mtp"}, "speculators_model_type='mtp': only dflash, "),
        ("z-lab", {"speculators_model_type": "dflash"}, "lacks transformer_layer_config, speculators_config"),
        ("z-lab", {"hidden_act": "gelu"}, "hidden_act='gelu': drafters here have hidden_act=silu only"),
        ("z-lab", {"attention_bias": True}, "attention_bias=True"),
        ("z-lab", {"model_type": "gemma4"}, "model_type='gemma4'"),
        ("z-lab", {"is_causal": True}, "is_causal=true with full attention"),
        ("z-lab", {"dflash_config": {"mask_token_id": 28}}, "lacks target_layer_ids"),
        ("z-lab", {"dflash_config": {**NESTED, "selector_rank": 256}}, "config.json lacks conv_kernel_size"),
        ("z-lab", {"dflash_config": {**NESTED, "output_multiplier": 2.0}}, "scale neither embeddings nor logits"),
        ("z-lab", {"dflash_config": {**NESTED, "projector_type": "domino"}}, "projector_type='domino'"),
        ("z-lab", {"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "the window's length is unknown"),
        (
            "DeepSpec DSpark",
            {"confidence_head_with_markov": False},
            "confidence_head_with_markov=False with markov_rank=6",
        ),
        (
            "SpecForge EAGLE-3.1",
            {"draft_vocab_size": 14},
            r"d2t: expected shape \[14\] \(draft_vocab_size\), found \[13\]",
        ),
    ],
)
def test_what_cannot_be_read_is_named(case: str, config: dict[str, Any], says: str, tmp_path: Path):
    source = changed(case, tmp_path / "checkpoint", config=config)
    with pytest.raises(ValueError, match=f"drafter.from_pretrained='{source}': .*{says}"):
        read_checkpoint(source)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"d2t": None}, "draft_vocab_size=13 of 29 tokens, but there is no d2t"),
        # Absolute ids where offsets belong, a known mistake.
        ({"d2t": VOCABULARIES["reduced"].draft_to_target}, r"d2t \(offsets, target id = draft id \+ d2t\): .*38"),
        ({"t2d": torch.zeros(29, dtype=torch.bool)}, "t2d marks 0 of 29 tokens and d2t names 13 of 29"),
    ],
)
def test_vocabulary_maps_must_agree(tensors: dict[str, Tensor | None], says: str, tmp_path: Path):
    source = changed("SpecForge EAGLE-3.1", tmp_path / "checkpoint", **tensors)
    with pytest.raises(ValueError, match=says):
        read_checkpoint(source)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"fc__weight": None}, r"fc\.weight: missing \(expected \[16, 48\]\)"),
        ({"norm__bias": torch.zeros(16)}, r"norm\.bias: not a parameter of this drafter"),
        ({"fc__weight": torch.zeros(16, 32)}, r"fc\.weight: expected \[16, 48\], found \[16, 32\]"),
        ({"embed_tokens__weight": torch.zeros(29, 16)}, r"embed_tokens\.weight is not the embedding of target tiny"),
        ({"lm_head__weight": torch.zeros(29, 16)}, r"lm_head\.weight is not the head of target tiny"),
        ({"lm_head__weight": torch.zeros(28, 16)}, r"lm_head\.weight: expected \[29, 16\], found \[28, 16\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tensors: dict[str, Tensor | None], says: str, tmp_path: Path):
    checkpoint = read_checkpoint(changed("DeepSpec DSpark", tmp_path / "checkpoint", **tensors))
    drafter = made("DeepSpec DSpark")
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    with pytest.raises(ValueError, match=says):
        load_weights(drafter, checkpoint)
    assert all(torch.equal(before[name], tensor) for name, tensor in drafter.state_dict().items())


def fit(checkpoint: Checkpoint, **changes: Any) -> None:
    """Against a config that fits, but for ``changes``."""
    options = {**checkpoint.description.options, **changes.pop("options", {})}
    settings: dict[str, Any] = {"algorithm": "dspark", "draft_vocab_size": None, "target": SPEC}
    check_fit(checkpoint, options=options, **{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"algorithm": "dflash"}, "run with drafter=dspark"),
        ({"options": {"block_size": 8}}, r"block_size: 4 in the checkpoint, 8 here\. Run with drafter\.block_size=4"),
        ({"options": {"num_layers": 3}}, r"Run with drafter\.num_layers=2"),
        ({"options": {"intermediate_size": 7}}, r"drafter\.intermediate_size=20"),
        ({"options": {"sample_from_anchor": False}}, r"Run with drafter\.sample_from_anchor=true"),
        ({"options": {"markov": None, "markov_rank": 9}}, r"Run with drafter\.markov=vanilla drafter\.markov_rank=6"),
        ({"options": {"window": {"tokens": 8, "full_layers": []}}}, r"Run with drafter\.window=null"),
        ({"draft_vocab_size": 13}, r"Run with data\.draft_vocab_size=29"),
        ({"target": replace(SPEC, layer_ids=(1, 2, 3))}, r"Run with 'target\.layer_ids=\[0,2,3\]'"),
        ({"target": replace(SPEC, mask_token_id=5)}, r"Run with target\.mask_token_id=28"),
        (
            {"target": replace(SPEC, hidden_size=32)},
            "another target: hidden_size: 16 in the checkpoint, 32 of target tiny",
        ),
        ({"target": replace(SPEC, vocab_size=30)}, "vocab_size: 29 in the checkpoint, 30 of target tiny"),
        ({"target": replace(SPEC, num_layers=6)}, "num_target_layers: 4 in the checkpoint, 6 of target tiny"),
    ],
)
def test_a_difference_from_the_config_comes_with_its_mend(changes: dict[str, Any], says: str, tmp_path: Path):
    written("DeepSpec DSpark", tmp_path / "checkpoint")
    checkpoint = read_checkpoint(str(tmp_path / "checkpoint"))
    fit(checkpoint)
    fit(checkpoint, options={"intermediate_size": None}, draft_vocab_size=29)
    with pytest.raises(ValueError, match=says):
        fit(checkpoint, **changes)


def test_the_mend_of_a_window_has_all_its_keys(tmp_path: Path):
    written("z-lab, window", tmp_path / "checkpoint")
    checkpoint = read_checkpoint(str(tmp_path / "checkpoint"))
    fit(checkpoint, algorithm="dflash", options={"window": {**WINDOW, "tokens": 6, "full_layers": [1]}})
    mend = r"'drafter\.window=\{tokens:6,origin:anchor,causal:true,full_layers:\[1\]\}'"
    with pytest.raises(ValueError, match=mend):
        fit(checkpoint, algorithm="dflash", options={"window": None})


@pytest.mark.parametrize(
    ("source", "says"),
    [("nowhere", "neither a folder nor a hub id"), ("owner/name", "the Hugging Face hub did not give it")],
)
def test_a_source_that_is_not_there(source: str, says: str):
    with pytest.raises(ValueError, match=f"drafter.from_pretrained='{source}' .*{says}"):
        read_checkpoint(source)


WINDOW = {"tokens": 8, "origin": "query", "causal": True, "full_layers": (0,)}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("eagle3", {"window": WINDOW}, None),
        ("dflash", {}, None),
        ("dflash", {"window": {**WINDOW, "causal": False}}, None),
        ("dflash", {"window": {**WINDOW, "full_layers": ()}}, None),
        ("dflash", {"window": WINDOW}, "one causal flag for all layers"),
        ("dflash", {"sample_from_anchor": True}, "layout 1 + N only; train with drafter.sample_from_anchor=false"),
        ("dflash2", {}, None),
        ("dflash2", {"vocabulary": "reduced"}, "train with data.draft_vocab_size=null"),
        ("dflash2", {"sample_from_anchor": True}, "layout 1 + N only"),
        ("dspark", {"window": WINDOW}, None),
        ("dspark", {"markov": "gated"}, "markov=gated: "),
        ("dspark", {"markov": "rnn"}, "markov=rnn: "),
        ("dspark", {"markov": None}, "markov=null: "),
    ],
)
def test_what_an_engine_cannot_serve(name: str, options: dict[str, Any], says: str | None):
    found = unservable(build(name, **options))
    assert len(found) == (says is not None)
    assert says is None or says in found[0]
