from dataclasses import replace

import pytest

from dspark_lab.records import TargetSpec
from dspark_lab.store.protocol import Manifest


def test_json_round_trip(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_hash_is_stable_and_sees_every_field(manifest: Manifest) -> None:
    changed = [
        replace(manifest, target="other"),
        replace(manifest, revision="r2"),
        replace(manifest, fingerprint="f2"),
        replace(manifest, template_hash="t2"),
        replace(manifest, layer_ids=(1, 2)),
        replace(manifest, hidden_size=16),
        replace(manifest, engine="vllm"),
        replace(manifest, dtype="float32"),
    ]
    assert Manifest.from_json(manifest.to_json()).content_hash == manifest.content_hash
    assert len({m.content_hash for m in [manifest, *changed]}) == len(changed) + 1


def test_check_lists_every_difference(manifest: Manifest) -> None:
    manifest.check(manifest)
    other = replace(manifest, target="big", layer_ids=(0, 4), dtype="float32")
    with pytest.raises(ValueError) as error:
        manifest.check(other, place="/some/root")
    message = str(error.value)
    for text in (
        "/some/root",
        "target: stored 'tiny', wanted 'big'",
        "(1, 2, 3)",
        "(0, 4)",
        "float32",
        "DSPARK_LAB_HOME",
    ):
        assert text in message
    assert "revision" not in message


def test_bytes_per_token(manifest: Manifest) -> None:
    assert manifest.bytes_per_token == 4 * 8 * 2 + 5
    assert replace(manifest, dtype="float32").bytes_per_token == 4 * 8 * 4 + 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"layer_convention": "leaving"}, "layer_convention='leaving'"),
        ({"schema_version": 99}, "schema_version=99"),
        ({"layer_ids": ()}, "layer_ids"),
        ({"hidden_size": 0}, "hidden_size=0"),
    ],
)
def test_unknown_forms_are_refused(manifest: Manifest, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(manifest, **change)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_not_a_manifest(text: str) -> None:
    with pytest.raises(ValueError):
        Manifest.from_json(text)


def test_unknown_field_is_named(manifest: Manifest) -> None:
    with pytest.raises(ValueError, match="surprise"):
        Manifest.from_json(manifest.to_json().replace('"engine"', '"surprise"'))


def test_for_target() -> None:
    spec = TargetSpec(
        "tiny", model="m", revision="r", fingerprint="f", template_hash="t", architecture="Qwen3", hidden_size=8,
        intermediate_size=16, num_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocab_size=32,
        rms_norm_eps=1e-6, max_position_embeddings=64, rope_parameters={}, layer_ids=(1, 3), mask_token_id=5,
        eos_token_ids=(2,),
    )  # fmt: skip
    made = Manifest.for_target(spec, engine="huggingface", dtype="float32")
    assert (made.target, made.revision, made.fingerprint, made.template_hash) == ("tiny", "r", "f", "t")
    assert (made.layer_ids, made.hidden_size, made.engine, made.dtype) == ((1, 3), 8, "huggingface", "float32")
