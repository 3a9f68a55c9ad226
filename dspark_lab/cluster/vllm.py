"""A vLLM server that serves a target with a drafter or captures its states, on a GPU or with vLLM's CPU engine."""

import json
import os
import re
import subprocess
import urllib.error
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from dspark_lab.cluster.services import GRACE_S, Role, Service
from dspark_lab.nearby import DIRECT, LOOPBACK, answers, free_port, post_json, stream_events

TRITON_CPU = Path(__file__).with_name("triton_cpu")  # what is in it, and why: its README

# For vLLM's CPU engine; a variable that is set already stays. "all" threads bound, its default, crashes it.
_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

_CAUSES = {
    r"No module named '?vllm": "this Python has no vLLM: name the one that has it (serve.python)",
    r"No such file or directory.*python|not found.*python": "serve.python or serve.command_prefix does not exist",
    r"address already in use": "another process took the port: run again",
    r"out of memory|OutOfMemoryError|Cannot allocate memory|died unexpectedly \(exit code: -9\)": (
        "the machine's memory does not hold target and drafter, beside what else runs there"
    ),
    r"No available memory for the cache blocks|KV cache is needed, which is larger": (
        "too little memory is left for the cache: a larger --gpu-memory-utilization in serve.arguments, or on CPU a larger "
        "VLLM_CPU_KVCACHE_SPACE (GiB)"
    ),
    r"Runner V2 requires Triton\.|No module named '?triton": (
        "this drafter needs vLLM's newer model runner and that needs Triton: pip install --no-deps triton"
    ),
    r"RPC call to \w+ timed out": (
        "a single step took longer than vLLM waits for one: fewer requests at a time (serve.concurrency), a machine that is "
        "less busy, or a larger VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
    ),
    r"greater than the derived max_model_len": "prompt and answer are longer than the target's context",
    r"not supported for now|architectures \[.*\] (are|is) not supported": (
        "this version of vLLM does not know the architecture of the target or of the drafter"
    ),
    r"size mismatch|shape mismatch|Attempted to load weight|KeyError: '(model\.)?layers": (
        "the weights do not fit the config: was the folder written for this target, and by this version?"
    ),
}


class VllmApi:
    """HTTP to a vLLM at ``url`` whose target is called ``model`` there."""

    url: str
    model: str
    version: str

    def check(self) -> None:
        """Raises ServiceError when the server is known to have ended."""

    def await_end(self) -> None:
        """Give a server whose engine has died the seconds in which it ends too."""

    def get(self, path: str, *, timeout_s: float = 30.0) -> str:
        """Body of a GET. OSError when the server does not answer."""
        with DIRECT.open(f"{self.url}{path}", timeout=timeout_s) as response:
            return response.read().decode()

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """JSON in, JSON out.

        Raises:
            ServiceError: the server has ended.
            ValueError: it refused the request; its own words.
            OSError: it did not answer in time.
        """
        with self._refusals(path):
            return post_json(f"{self.url}{path}", body, timeout_s=timeout_s)

    def stream(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Iterator[bytes]:
        """The JSON of each piece of a streamed reply, when it comes. Raises as ``post``."""
        with self._refusals(path):
            yield from stream_events(f"{self.url}{path}", body, timeout_s=timeout_s)

    @contextmanager
    def _refusals(self, path: str) -> Iterator[None]:
        try:
            yield
        except urllib.error.HTTPError as error:
            with error:
                told = error.read().decode(errors="replace")
            if error.code >= 500:
                self.await_end()
            self.check()
            raise ValueError(f"vLLM refused {path} ({error.code}): {told}") from error
        except OSError:
            self.check()
            raise


class RunningVllm(VllmApi):
    """A vLLM that somebody else has started; it is left running.

    Raises:
        ValueError: nothing answers at ``url``, or it serves none of ``targets`` (names and folders of one model).
    """

    def __init__(self, url: str, *, targets: Collection[str]) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            served = json.loads(self.get("/v1/models"))["data"]
            self.version = json.loads(self.get("/version"))["version"]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"no vLLM answers at {url}: {error}") from error
        known = [entry for entry in served if {entry["id"], entry.get("root")} & set(targets)]
        if not known:
            names = ", ".join(str(entry["id"]) for entry in served)
            raise ValueError(f"{url} serves {names}, the run's target is {' or '.join(targets)}: name another server")
        self.model = known[0]["id"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return


class VllmServer(Service, VllmApi):
    """vLLM with its OpenAI-compatible API, started here.

    Args:
        model: Folder or hub id of the target.
        arguments: Of ``vllm.entrypoints.openai.api_server``.
        on_cpu: Whether it is vLLM's CPU engine.
        interpret: Let Triton's kernels be interpreted on the CPU; slow, but the newer model runner works there.

    Raises:
        ServiceError: it ended, or was not ready after ``deadline_s``; names the cause where it is a known one.
    """

    def __init__(
        self,
        *,
        folder: Path,
        model: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        on_cpu: bool,
        interpret: bool = False,
        host: str = LOOPBACK,
        role: Role | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        port = free_port(host)
        self.url, self.model = f"http://{host}:{port}", model
        # Not `vllm serve`: that of vllm-cpu looks for a package named vllm.
        command = (role or Role()).command(
            "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", host, "--port", str(port),
            *(["--enforce-eager"] if on_cpu else []), *arguments,
        )  # fmt: skip
        added = {**engine_environment(on_cpu=on_cpu, interpret=interpret), **(environment or {})}
        super().__init__("vllm", command, folder=folder, environment=added)
        self.wait_ready(lambda: answers(f"{self.url}/health"), deadline_s=deadline_s)
        self.version = json.loads(self.get("/version"))["version"]

    def await_end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)

    def _tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            told = file.read().decode(errors="replace")
        found = {"Likely cause": likely_cause(told), "First error": first_error(told)}
        causes = [f"{name}: {text.rstrip('. ')}." for name, text in found.items() if text]
        return " ".join([*causes, super()._tail()])


def capture_arguments(layer_ids: Sequence[int], *, transfer: Mapping[str, Any]) -> list[str]:
    """Arguments that make a server capture hidden states.

    ``layer_ids``: states entering these decoder layers, the number of layers for the last one before the final norm.
    ``transfer``: ``through_mooncake`` or ``through_files``.
    """
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}}
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft}
    # A cached prefix would not be captured again.
    return [
        "--no-enable-prefix-caching", "--speculative-config", json.dumps(speculative),
        "--kv-transfer-config", json.dumps({**transfer, "kv_role": "kv_producer"}),
    ]  # fmt: skip


def answer_arguments(*, on_cpu: bool) -> list[str]:
    """Arguments of a server that only answers."""
    # vLLM's CPU engine dies of a prompt in chunks whose request has a seed.
    return ["--no-enable-chunked-prefill"] if on_cpu else []


def through_mooncake(connection: Mapping[str, Any]) -> dict[str, Any]:
    """``connection``: of the connector, as ``hs_connectors.MooncakeStoreConfig``."""
    return {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "dspark_lab.capture.connector",
        "kv_connector_extra_config": {"mooncake": dict(connection)},
    }


def through_files(folder: Path) -> dict[str, Any]:
    """``folder``: as the server sees it."""
    return {
        "kv_connector": "DiskHiddenStatesConnector",
        "kv_connector_module_path": "dspark_lab.capture.disk_connector",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def engine_environment(*, on_cpu: bool, interpret: bool) -> dict[str, str]:
    """Variables of the server alone. Nothing is fetched and nothing reported: target and drafter are folders."""
    added = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    if on_cpu:
        added |= {name: value for name, value in _CPU.items() if name not in os.environ}
    if interpret:
        paths = [str(TRITON_CPU), *filter(None, [os.environ.get("PYTHONPATH")])]
        added |= {
            "TRITON_INTERPRET": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1800",  # for one step; its 300 are too few on a busy CPU
        }
    return added


def likely_cause(log: str) -> str | None:
    """What a log of a failed start says, with the mend; None when no known cause is in it."""
    return next((cause for pattern, cause in _CAUSES.items() if re.search(pattern, log)), None)


def first_error(log: str) -> str | None:
    """The first exception of a log: with vLLM the later ones only say that it happened."""
    found = _EXCEPTION.search(log)
    return found and found[1]


# At the start of a line, behind vLLM's "(process pid=1)" and "ERROR date time [file:line]".
_EXCEPTION = re.compile(
    r"^(?:\(\w+ pid=\d+\) )?(?:ERROR \S+ \S+ \[\S+\] )?((?:\w+\.)*\w+(?:Error|Exception): .*)$", re.MULTILINE
)
