"""`+experiment=reproduce_*` where neither hub nor GPU is there: its plan and what is missing, and exit code 3."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_the_plan_is_told_and_nothing_is_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dspark_lab", "+experiment=reproduce_deepspec_qwen3_8b", f"run.root={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "400"})
    assert done.returncode == 3, done.stderr
    assert (
        "plan: deepseek-ai/dspark_qwen3_8b_block7 drafts for Qwen/Qwen3-8B: deepspec, up to 744 prompts" in done.stdout
    )
    assert "gsm8k 6.17" in done.stdout and "humaneval 5.52" in done.stdout and "mt_bench 3.72" in done.stdout
    for missing in ("Qwen/Qwen3-8B: ", "deepseek-ai/dspark_qwen3_8b_block7: ", "a CUDA GPU"):
        assert f"- {missing}" in done.stderr
    assert "set drafter.from_pretrained to a folder" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
