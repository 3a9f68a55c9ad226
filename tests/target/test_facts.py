"""A target as data says the same as its own files, without its class."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark_lab.target.facts import Facts, HeadTensors
from dspark_lab.target.huggingface import HuggingFaceTarget
from dspark_lab.target.resolve import ASSETS

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def tiny(home: Path, facts: Facts | None, *, model: str = "tiny") -> HuggingFaceTarget:
    return HuggingFaceTarget(
        name="tiny", model=model, home=home, layer_ids=(1, 2, 3), mask_token_id=3, dtype="float32", facts=facts
    )


def test_facts_stand_for_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = tiny(tmp_path, None)
    spec, head = known.spec, known.head()
    tied = head.lm_head is head.embedding
    facts = Facts(
        **{name: getattr(spec, name) for name in Facts.__dataclass_fields__ if hasattr(spec, name)},
        runs_tokenizer_code=False,
        tensors=HeadTensors(embedding=EMBEDDING, norm=NORM, lm_head=EMBEDDING if tied else "lm_head.weight"),
    )
    told = tiny(tmp_path, facts)
    monkeypatch.setattr(HuggingFaceTarget, "config", property(lambda self: pytest.fail("the config was read")))
    assert told.spec == spec
    for name in ("embedding", "norm_weight", "lm_head"):
        assert torch.equal(getattr(told.head(), name), getattr(head, name))
    wrong = replace(facts, tensors=HeadTensors(embedding="embed", norm=NORM, lm_head=EMBEDDING))
    with pytest.raises(ValueError, match=r"target\.facts\.tensors: embed is in no safetensors file"):
        tiny(tmp_path, wrong).head()
    own = with_tokenizer_of_its_own(tmp_path / "own")
    with pytest.raises(ValueError, match=r"set target\.facts\.runs_tokenizer_code=true"):
        tiny(tmp_path, facts, model=own).tokenizer  # noqa: B018
    trusted = tiny(tmp_path, replace(facts, runs_tokenizer_code=True), model=own).tokenizer
    assert type(trusted).__name__ == "OwnTokenizer" and trusted.encode("so") == told.tokenizer.encode("so")


def with_tokenizer_of_its_own(folder: Path) -> str:
    """As Kimi's: the class that reads it is Python beside it."""
    shutil.copytree(ASSETS / "tiny", folder)
    path = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (folder / "config.json").write_text('{"model_type": "own"}')
    (folder / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    return str(folder)
