"""The flagship in small: one command, from prompts to a drafter that a real vLLM serves, over real Mooncake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_lab.report.results import read_results

try:
    import mooncake  # pyright: ignore[reportMissingImports]
    import vllm  # pyright: ignore[reportMissingImports]
except ImportError:
    mooncake = vllm = None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.mooncake,
    pytest.mark.skipif(vllm is None, reason="vllm or mooncake is not installed: make test-services"),
]


def test_the_flagship_is_rehearsed_from_prompts_to_a_served_drafter(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dspark_lab", "+rehearse=cpu", "+experiment=kimi_k3_dspark", f"run.root={tmp_path / 'runs'}"],
        capture_output=True, text=True, env={**os.environ, "DSPARK_LAB_HOME": str(tmp_path / "home"), "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    assert "Rehearsed: the experiment with these replaced" in done.stdout
    (run,) = (tmp_path / "runs").glob("kimi_k3_dspark-cpu-dspark-*")
    found = read_results(run)
    stages = {stage.name: stage for stage in found.stages}
    assert list(stages) == [
        "plan", "regenerate", "capture", "train", "evaluate", "calibrate", "export", "serve", "simulate", "report",
    ]  # fmt: skip
    assert stages["train"].events["live samples used"] > 0
    metrics = {entry.name: entry for entry in found.metrics}
    served, difference = metrics["served_acceptance_length"], metrics["served_acceptance_difference"]
    assert served.value is not None and served.value > 1.2
    assert (served.setting["temperature"], served.setting["verification"]) == (1.0, "block")
    assert metrics["acceptance_length"].setting["temperature"] == 0.0  # what is calibrated and simulated
    low, high = difference.low, difference.high
    assert low is not None and high is not None
    # Twice the 95 % interval of the same prompts: replay and engine draw their own random numbers.
    assert (3 * low - high) / 2 < 0 < (3 * high - low) / 2, done.stdout[-3000:]
    simulated = [entry for name, entry in metrics.items() if name.startswith("simulated_")]
    assert simulated and {entry.setting["hardware"] for entry in simulated} == {"gb300_nvl72"}
    assert (run / "export" / "README.md").is_file() and (run / "calibration.json").is_file()
    assert "Simulated serving" in (run / "report.html").read_text()
