"""`store=mooncake` through the pipeline: the states go through Mooncake's processes, and the run is the one from memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_lab.cluster.services import MooncakeMaster, MooncakeSegment
from dspark_lab.store.mooncake_admin import object_names

try:
    import mooncake  # pyright: ignore[reportMissingImports]
except ImportError:
    mooncake = None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.mooncake,
    pytest.mark.skipif(mooncake is None, reason="mooncake is not installed: make test-services"),
]


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    stages = "stages=[regenerate,capture,train]"
    command = [
        sys.executable,
        "-m",
        "dspark_lab",
        "+experiment=smoke",
        "data.train.num_prompts=80",
        stages,
        f"run.root={folder / 'runs'}",
        *overrides,
    ]
    environment = {**os.environ, "DSPARK_LAB_HOME": str(folder.parent / "home"), "COLUMNS": "120"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def losses(folder: Path) -> list[float]:
    (log,) = folder.glob("runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [value for line in lines for name, value in line.get("metrics", line).items() if name == "train/loss"]


def test_the_run_is_the_one_from_memory(tmp_path: Path) -> None:
    services = tmp_path / "services"
    with (
        MooncakeMaster(folder=services) as master,
        MooncakeSegment(master, folder=services, num_bytes=256 * 2**20),
    ):
        place = (f"store.master_address={master.address}", f"store.admin_url={master.admin_url}")
        refused = run(tmp_path / "mooncake", "store=mooncake", *place, "data.num_workers=1")
        assert "data.num_workers>0 with store=mooncake" in refused.stdout + refused.stderr
        done = run(tmp_path / "mooncake", "store=mooncake", *place, "data.num_workers=0")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        names = object_names(master.admin_url, prefix="smoke-")
        assert any("/head/" in name for name in names)
    reference = run(tmp_path / "memory", "store=memory", "data.num_workers=0")
    assert reference.returncode == 0, reference.stderr[-4000:]
    assert losses(tmp_path / "mooncake") == losses(tmp_path / "memory") != []

    # The same by services of the run's own; then in two ranks, which join them.
    own = run(tmp_path / "local", "store=mooncake", "cluster=local", "data.num_workers=0")
    assert own.returncode == 0, own.stdout[-2000:] + own.stderr[-4000:]
    assert losses(tmp_path / "local") == losses(tmp_path / "memory")
    ranks = ("trainer.devices=2", "trainer.accelerator=cpu", "trainer.max_steps=4")
    two = run(tmp_path / "ranks", "store=mooncake", "cluster=local", "data.num_workers=0", *ranks)
    assert two.returncode == 0, two.stdout[-2000:] + two.stderr[-4000:]
