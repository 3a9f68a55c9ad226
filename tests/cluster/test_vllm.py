"""Starting vLLM: the environment of its process alone, and what a failed start tells."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import stand_in_vllm

from dspark_lab.cluster.services import Role, ServiceError
from dspark_lab.cluster.vllm import TRITON_CPU, VllmServer, engine_environment, first_error, likely_cause

LOG = """\
(EngineCore pid=9) ERROR 11-29 19:36 [core.py:1] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-29 19:36 [core.py:1] ValueError: Model Runner V2 requires Triton.
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_a_failed_start_names_its_cause_and_its_first_error(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text("OutOfMemoryError: of an earlier start\n")
    (tmp_path / "told").write_text(LOG)
    role = Role(command_prefix=("sh", "-c", f"cat {tmp_path / 'told'}; exit 3"))
    with pytest.raises(ServiceError) as error:
        VllmServer(folder=tmp_path, model="m", on_cpu=True, role=role, deadline_s=20)
    told = str(error.value)
    assert told.startswith("vllm has ended with status 3. Likely cause: this drafter needs vLLM's newer model runner")
    assert "pip install --no-deps triton. First error: ValueError: Model Runner V2 requires Triton. Last" in told
    assert "Engine core initialization failed" in told and "memory" not in told.partition("Last lines")[0]


def test_an_engine_that_dies_at_work_is_told_by_its_log(tmp_path: Path) -> None:
    role = Role(command_prefix=(sys.executable, stand_in_vllm.__file__))
    with (
        VllmServer(folder=tmp_path, model="m", on_cpu=True, role=role, deadline_s=60) as server,
        pytest.raises(ServiceError) as error,
    ):
        server.post("/v1/completions", {}, timeout_s=60)
    told = str(error.value)
    assert told.startswith(
        "vllm has ended with status 1. Likely cause: a single step took longer than vLLM waits for one"
    )
    assert "First error: TimeoutError: RPC call to sample_tokens timed out. Last lines" in told


def test_a_python_without_vllm(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"name the one that has it \(serve.python\)"):
        # Isolated and without site-packages, whatever is installed here.
        role = Role(command_prefix=(sys.executable, "-IS", "-c", "import vllm"))
        VllmServer(folder=tmp_path, model="m", on_cpu=True, role=role)


def test_an_unknown_failure_has_no_cause_and_a_killed_process_has_one() -> None:
    assert likely_cause("nothing of note") is None
    killed = likely_cause("ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.")
    assert killed and killed.startswith("the machine's memory")
    warning = (
        "WARNING 11-29 19:37:25 [x.py:9] Found ulimit of 1; this can cause OSError: [Errno 24] Too many open files\n"
    )
    assert first_error(warning) is None
    assert first_error(f"{warning}(Worker_1 pid=7) torch.OutOfMemoryError: 3 GiB") == "torch.OutOfMemoryError: 3 GiB"


def test_a_variable_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    found = engine_environment(on_cpu=True, interpret=False)
    assert "VLLM_CPU_KVCACHE_SPACE" not in found
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert found["VLLM_NO_USAGE_STATS"] == found["HF_HUB_OFFLINE"] == "1"
    assert not any(name.startswith("VLLM_CPU") for name in engine_environment(on_cpu=False, interpret=False))


def test_the_stub_is_seen_by_that_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/own")
    found = engine_environment(on_cpu=True, interpret=True)
    assert found["PYTHONPATH"].split(os.pathsep) == [str(TRITON_CPU), "/own"]
    assert (found["TRITON_INTERPRET"], found["VLLM_USE_V2_MODEL_RUNNER"]) == ("1", "1")
    assert float(found["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]) > 300  # vLLM's own, which kills an engine on a busy CPU
    assert "PYTHONPATH" not in engine_environment(on_cpu=True, interpret=False)
    named = (
        "from importlib.metadata import entry_points\n"
        "print(*[point.value for point in entry_points(group='triton.backends') if point.name == 'cpu'])"
    )
    shown = [
        subprocess.run(
            [sys.executable, "-c", named], capture_output=True, text=True, env={**os.environ, **added}
        ).stdout
        for added in ({}, found)
    ]
    assert [text.split() for text in shown] == [[], ["triton_cpu_stub"]]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: make test-services")
def test_interpreted_kernels_have_log1p() -> None:
    """Of which Triton's interpreter knows the name alone."""
    kernel = [sys.executable, str(Path(__file__).with_name("interpreted_kernel.py"))]
    added = engine_environment(on_cpu=True, interpret=True)
    done = subprocess.run(kernel, capture_output=True, text=True, env={**os.environ, **added})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == pytest.approx([math.log1p(x) for x in (-0.75, -1e-6, 0.0, 3.0)], rel=1e-6)
