"""The exported folder: whole or absent, every key written, both cards."""

import errno
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from safetensors import safe_open
from tiny_world import SPEC, VOCABULARIES, build

import dspark_lab.checkpoint.export as export_module
from dspark_lab.checkpoint.card import Provenance, model_card, target_licence
from dspark_lab.checkpoint.description import describe, format_of
from dspark_lab.checkpoint.engines import serve_command
from dspark_lab.checkpoint.export import write_folder
from dspark_lab.checkpoint.speculators import config_of, tensors_of
from dspark_lab.drafter.base import Drafter
from dspark_lab.drafter.dspark import DSpark
from dspark_lab.pipeline import carry_out

COMMON = {
    "architectures",
    "speculators_model_type",
    "speculators_version",
    "dtype",
    "tie_word_embeddings",
    "draft_vocab_size",
    "target_hidden_size",
    "speculators_config",
    "transformer_layer_config",
}
BLOCK = {
    "aux_hidden_state_layer_ids",
    "block_size",
    "mask_token_id",
    "sample_from_anchor",
    "sliding_window_non_causal",
}
KEYS = {  # algorithms.md 7.2 to 7.4
    "eagle3": COMMON
    | {
        "eagle_aux_hidden_state_layer_ids",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "embed_requires_grad",
    },
    "dflash": COMMON | BLOCK,
    "dflash2": COMMON | BLOCK | {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"},
    "dspark": COMMON
    | BLOCK
    | {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"},
}


def configured(name: str, **options: Any) -> dict[str, Any]:
    drafter = build(name, **options)
    return config_of(describe(drafter), verifier="owner/target", architecture="LlamaForCausalLM", dtype="bfloat16")


@pytest.mark.parametrize("name", KEYS)
def test_every_key_is_written(name: str):
    config = configured(name)
    assert config.keys() == KEYS[name]
    layers = config["transformer_layer_config"]
    assert layers["layer_types"] == ["full_attention"] * 2
    assert layers["head_dim"] == SPEC.head_dim
    assert layers["max_position_embeddings"] == SPEC.max_position_embeddings
    assert {"rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window"} <= layers.keys()
    speculators = config["speculators_config"]
    assert speculators["verifier"] == {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]}
    (method,) = speculators["proposal_methods"]
    assert method["speculative_tokens"] == {"eagle3": 5, "dflash": 3, "dflash2": 3, "dspark": 4}[name]


def test_what_vllm_needs_beyond_the_format():
    """Read in the sources of vLLM 0.32; see ``speculators._layer_config``."""
    assert configured("dflash")["sliding_window_non_causal"] is True
    assert configured("eagle3")["transformer_layer_config"]["num_aux_hidden_states"] == len(SPEC.layer_ids)
    window = {"tokens": 8, "origin": "anchor", "causal": False, "full_layers": ()}
    assert configured("dspark", window=window)["transformer_layer_config"]["is_causal"] is False
    causal = configured("dspark", window={**window, "causal": True, "full_layers": (1,)})
    assert causal["sliding_window_non_causal"] is False
    layers = causal["transformer_layer_config"]
    assert "is_causal" not in layers
    assert layers["layer_types"] == ["sliding_attention", "full_attention"]
    assert (layers["sliding_window"], layers["use_sliding_window"]) == (8, True)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", KEYS)
def test_the_targets_matrices_are_left_out_where_loaders_take_them_from_it(name: str, vocabulary: str):
    drafter = build(name, vocabulary=vocabulary)
    extra = {
        standalone: tensors_of(drafter, dtype=torch.bfloat16, include_target_tensors=standalone).keys()
        - drafter.state_dict().keys()
        for standalone in (False, True)
    }
    maps = {"t2d", "d2t"} if vocabulary == "reduced" else set()
    both = {"embed_tokens.weight", "lm_head.weight"} | maps
    assert extra[True] == both
    if name == "eagle3":
        assert extra[False] == both
    else:
        assert extra[False] == ({"lm_head.weight"} | maps if maps else set())


def test_a_subclass_has_no_format():
    class Mine(DSpark):
        pass

    assert format_of(DSpark).name == "dspark"
    with pytest.raises(ValueError, match=r"Mine has no checkpoint format.*leave export out of stages"):
        format_of(Mine)


def test_it_is_refused_before_anything_is_done():
    node = {"drafter": {"_target_": "dspark_lab.drafter.block.BlockDrafter"}}
    parts: Any = SimpleNamespace(config=OmegaConf.create(node))
    with pytest.raises(ValueError, match="BlockDrafter has no checkpoint format"):
        carry_out(["train", "export"], parts)


def write(folder: Path, drafter: Drafter, *, card: str = "card") -> int:
    config = config_of(describe(drafter), verifier="owner/target", architecture="Any", dtype="float32")
    tensors = tensors_of(drafter, dtype=torch.float32, include_target_tensors=False)
    return write_folder(folder, config=config, tensors=tensors, model_card=card, run_card={"run": "a"})


def test_a_folder_is_written_and_written_again(tmp_path: Path):
    folder = tmp_path / "run" / "export"
    drafter = build("dspark")
    num_bytes = write(folder, drafter)
    assert num_bytes == sum(4 * tensor.numel() for tensor in drafter.state_dict().values())
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
        "run_card.json",
    }
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    write(folder, drafter, card="newer")
    assert (folder / "README.md").read_text() == "newer"
    assert [path.name for path in folder.parent.iterdir()] == ["export"]


def test_a_full_disk_leaves_the_earlier_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, drafter = tmp_path / "export", build("dspark")
    write(folder, drafter, card="older")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_module, "save_file", full)
    with pytest.raises(
        ValueError, match=r"export: the disk is full \([\d,]+ bytes are needed.*earlier export is untouched"
    ):
        write(folder, drafter)
    assert (folder / "README.md").read_text() == "older"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_killed_run_leaves_nothing_in_the_way(tmp_path: Path):
    (tmp_path / ".export.partial").mkdir()
    (tmp_path / ".export.partial" / "model.safetensors").touch()
    (tmp_path / ".export.old").mkdir()
    write(tmp_path / "export", build("dflash"))
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_folder_that_is_no_export_is_not_touched(tmp_path: Path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "mine").touch()
    with pytest.raises(ValueError, match=r"export exists and is no earlier export \(it has no run_card\.json\)"):
        write(tmp_path / "export", build("dflash"))
    assert (tmp_path / "export" / "mine").exists()


CONFIG = {
    "loss": {"_target_": "x", "normalizer": "global", "dspark": {"terms": {"ce": 0.1}}},
    "optimizer": {"lr": 0.004},
    "lr_schedule": {"warmup_share": 0.04},
    "trainer": {"max_steps": 7},
}
PROVENANCE = Provenance(
    run="smoke-dspark-1",
    checkpoint="best, step 7",
    command="python -m dspark_lab seed=3",
    config=CONFIG,
    target=SPEC,
    target_licence="apache-2.0",
    imported_from=None,
    sources=[{"name": "math", "num_samples": 5, "num_tokens": 99, "revision": "abc", "licence": "mit"}],
    acceptance="| drafter | acceptance length |",
)


def card(*, verifier: str = "owner/target", warnings: tuple[str, ...] = (), **changes: Any) -> str:
    command = serve_command(describe(build("dspark")), target=verifier, folder="/runs/export")
    return model_card(
        describe(build("dspark")),
        replace(PROVENANCE, **changes),
        verifier=verifier,
        serve_command=command,
        faults=["it rounds"],
        under_load="By the number of requests: none.",
        warnings=warnings,
    )


def test_the_model_card_says_where_the_drafter_comes_from_and_how_to_serve_it():
    text = card()
    front = yaml.safe_load(text.split("---")[1])
    assert front["license"] == "apache-2.0"
    assert front["base_model"] == "owner/target"
    assert (
        """vllm serve owner/target --speculative-config '{"model": "/runs/export", "num_speculative_tokens": 4, """
        """"method": "dspark", "draft_sample_method": "probabilistic", "rejection_sample_method": "block"}'"""
    ) in text
    for told in ("apache-2.0; it binds", "seed=3", "max_steps=7", "'ce': 0.1", "| math | 5 | 99 | abc | mit |"):
        assert told in text
    assert PROVENANCE.acceptance in text
    assert "## Under load\n\nBy the number of requests: none." in text
    assert "```\n\nit rounds.\n\n## Under load" in text
    assert "cannot serve" not in text
    assert "* markov=gated: no" in card(warnings=("markov=gated: no",))


def test_a_card_without_licence_hub_or_data_says_so():
    text = card(verifier="/targets/tiny", target_licence=None, sources=(), imported_from="owner/drafter")
    front = yaml.safe_load(text.split("---")[1])
    assert "license" not in front and "base_model" not in front
    assert "licence: not recorded: see the target's model card" in text
    assert "Weights imported from `owner/drafter`" in text
    assert "data: not recorded by this run" in text


def test_the_targets_licence_is_the_configs_or_its_own_cards(tmp_path: Path):
    assert target_licence(None, tmp_path) is None
    (tmp_path / "README.md").write_text("---\nlicense: llama3.1\n---\n# A model\n")
    assert target_licence(None, tmp_path) == "llama3.1"
    assert target_licence("mit", tmp_path) == "mit"


def test_mixed_windows_of_dflash_ask_for_the_newer_runner():
    window = {"tokens": 8, "origin": "anchor", "causal": False, "full_layers": (1,)}
    described = describe(build("dflash", window=window))
    assert serve_command(described, target="t", folder="f").startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve t ")


def test_lengths_by_load_become_the_engines_own_key():
    command = serve_command(describe(build("eagle3")), target="t", folder="f", lengths=[(1, 8, 3), (9, 256, 0)])
    assert '"num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 256, 0]]' in command


def test_cards_are_json(tmp_path: Path):
    write(tmp_path / "export", build("eagle3"))
    assert json.loads((tmp_path / "export" / "run_card.json").read_text()) == {"run": "a"}
    assert json.loads((tmp_path / "export" / "config.json").read_text())["speculators_model_type"] == "eagle3"
