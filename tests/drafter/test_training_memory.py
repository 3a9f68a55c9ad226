"""What the plan says of memory, against a real training step: the Kimi-K3 drafter at 1/64 of its width, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_step_takes_the_memory_that_the_plan_says() -> None:
    """In a process of its own, whose peak is the step's. True vocabulary and row length; fewer anchors, for the time."""
    script = Path(__file__).with_name("one_step.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["vocab_size"] == 163_840 and told["row_tokens"] == 8192
    assert told["planned"] == pytest.approx(told["measured"], rel=0.15), told
