"""A target as data says the same as its own files, without its class."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark_lab.target.facts import Facts, HeadTensors
from dspark_lab.target.huggingface import HuggingFaceTarget

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def tiny(home: Path, facts: Facts | None) -> HuggingFaceTarget:
    return HuggingFaceTarget(
        name="tiny", model="tiny", home=home, layer_ids=(1, 2, 3), mask_token_id=3, dtype="float32", facts=facts
    )


def test_facts_stand_for_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = tiny(tmp_path, None)
    spec, head = known.spec, known.head()
    tied = head.lm_head is head.embedding
    facts = Facts(
        **{name: getattr(spec, name) for name in Facts.__dataclass_fields__ if name != "tensors"},
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
