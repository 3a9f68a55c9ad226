"""stages=profile on the tiny target, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark_lab.hardware.protocol import StepShape
from dspark_lab.hardware.table import MeasuredHardware, TableProfile
from dspark_lab.pipeline.profile import measured_draft
from dspark_lab.report.results import read_results

SMALL = ("profile.num_context_tokens=[8,24]", "profile.num_requests=[1,2]", "profile.repeats=3", "trainer.max_steps=2")


def call(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "dspark_lab",
        "+experiment=smoke",
        f"run.root={folder / 'runs'}",
        *SMALL,
        *overrides,
    ]
    home = {**os.environ, "DSPARK_LAB_HOME": str(folder / "home"), "COLUMNS": "160"}
    return subprocess.run(command, capture_output=True, text=True, env=home)


def profiled(folder: Path) -> TableProfile:
    (path,) = folder.glob("runs/*/profile.json")
    return TableProfile.fit(MeasuredHardware(name="measured", path=str(path), memory_bytes=None).measurement)


@pytest.mark.slow
def test_it_stores_what_measured_hardware_reads(tmp_path: Path) -> None:
    done = call(tmp_path, "stages=[regenerate,capture,train,profile]")
    assert done.returncode == 0, done.stderr[-3000:]
    table = profiled(tmp_path)
    assert table.measurement.target == "tiny"
    assert float(table.verify_time_s(StepShape(1, 1, 0, 16))) > 0
    assert [draft.num_requests for draft in table.measurement.drafts] == [1, 2]
    assert table.measurement.setting["num_draft_tokens"] == 8

    (directory,) = tmp_path.glob("runs/*")
    found = {entry.name: entry for entry in read_results(directory).metrics}
    for name in ("profile_step_time_s", "profile_draft_time_s", "profile_fit_error"):
        assert found[name].origin == "measured"
        assert found[name].value is not None and found[name].value > 0


def test_without_a_trained_drafter_its_time_is_left_out(tmp_path: Path) -> None:
    parts = SimpleNamespace(run=SimpleNamespace(checkpoints=tmp_path), imported=None)
    assert measured_draft(parts, None) == ((), {})  # pyright: ignore
