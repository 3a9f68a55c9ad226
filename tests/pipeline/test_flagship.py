"""``python -m dspark_lab +experiment=kimi_k3_dspark`` away from the rack: the plan, what is missing, exit code 3."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "dspark_lab", "+experiment=kimi_k3_dspark"]


@pytest.mark.slow
def test_on_a_laptop_it_says_what_is_missing_and_how_to_mend_it(tmp_path: Path) -> None:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    outside |= {"PATH": "", "COLUMNS": "200", "HF_HUB_OFFLINE": "1", "DSPARK_LAB_HOME": str(tmp_path)}
    done = subprocess.run([*COMMAND, f"run.root={tmp_path}"], capture_output=True, text=True, env=outside, timeout=300)
    assert done.returncode == 3, done.stderr
    assert "8 on 2 nodes" in done.stdout and "trainer ranks 0 to 3" in done.stdout
    assert "no sbatch" in done.stderr and "+rehearse=cpu" in done.stderr and "moonshotai/Kimi-K3" in done.stderr
    assert done.stderr.count("mend:") == len(re.findall(r"^  - ", done.stderr, re.MULTILINE)) >= 3
    assert "Traceback" not in done.stderr + done.stdout
    (plan,) = tmp_path.glob("*/plan.json")
    assert '"serving_nodes": 2' in plan.read_text()
