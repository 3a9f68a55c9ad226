"""A real vLLM answers, is probed, and captures: through files for the disk store, through Mooncake live, killed meanwhile.
DSpark trains from its states as from Transformers'."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dspark_lab.records import TokenizedConversation
from dspark_lab.report.results import read_results
from dspark_lab.store.disk import DiskStore
from dspark_lab.store.protocol import Manifest
from dspark_lab.target.huggingface import HuggingFaceTarget

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
SMALL = (
    "data.train.num_prompts=24", "data.validation.num_prompts=4", "data.max_new_tokens=40", "data.num_workers=0",
    "benchmark.prompts.num_prompts=4", "trainer.max_steps=6", "trainer.val_every_steps=6", "trainer.log_every_steps=1",
)  # fmt: skip
STAGES = "stages=[regenerate,capture,train]"


@dataclass
class Done:
    folder: Path
    printed: str

    @property
    def payloads(self) -> Path:
        return self.folder / "payloads"

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / name

    def losses(self, name: str) -> list[float]:
        lines = [json.loads(line) for line in (self.run_folder(name) / "metrics.jsonl").read_text().splitlines()]
        return [value for line in lines for key, value in line.get("metrics", line).items() if key == "train/loss"]


def start(folder: Path, *overrides: str, experiment: str = "smoke") -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "dspark_lab", f"+experiment={experiment}"),
        *SMALL,
        *(f"run.root={folder / 'runs'}", *overrides),
    ]
    environment = {**os.environ, "DSPARK_LAB_HOME": str(folder / "home"), "COLUMNS": "120"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate()
    assert process.returncode == 0, printed[-6000:]
    return printed


def call(folder: Path, *overrides: str) -> str:
    return finish(start(folder, *overrides))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    folder = tmp_path_factory.mktemp("engine")
    files = f"engine.payload_folder={folder / 'payloads'}"
    yield Done(folder, call(folder, "engine=vllm", "cluster=local", files, STAGES, "run.name=vllm"))


def test_every_service_is_started_once_and_gone_with_the_run(done: Done) -> None:
    assert re.findall(r"cluster: starting (.*) \(", done.printed) == ["the vLLM that answers", "the vLLM that captures"]
    assert [path.name for path in (done.run_folder("vllm") / "logs").iterdir()] == ["vllm.log"]
    assert not children(done.folder)
    assert not list(done.payloads.iterdir())


def children(folder: Path) -> list[int]:
    """Processes of runs in ``folder``, their services included."""
    home, found = f"DSPARK_LAB_HOME={folder / 'home'}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if home in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def test_the_stages_tell_what_happened(done: Done) -> None:
    stages = {stage.name: stage for stage in read_results(done.run_folder("vllm")).stages}
    assert stages["regenerate"].events["servers admitted"] == 2  # once for each sampling
    assert stages["capture"].events["servers admitted"] == 1
    assert stages["capture"].events["captured"] == stages["capture"].num_out >= 32


def test_the_states_are_those_of_transformers(done: Done) -> None:
    target = HuggingFaceTarget(
        name="tiny", model="tiny", home=done.folder / "home", layer_ids=(1, 2, 3), mask_token_id=3, dtype="float32"
    )
    manifest = Manifest.for_target(target.spec, engine="vllm")
    with DiskStore(
        manifest=manifest, root=done.folder / "home" / "states" / manifest.content_hash, shard_bytes=2**26, reserve_bytes=0
    ) as store:  # fmt: skip
        captured = {key: store.get(key) for key in sorted(store.keys())}
    conversations = [TokenizedConversation(key, s.token_ids, s.loss_mask) for key, s in captured.items()]
    for key, ours in target.capture(conversations):
        theirs = captured[key]
        assert theirs.hidden_states.dtype == torch.bfloat16
        for name in ("hidden_states", "last_hidden_state"):
            found, wanted = getattr(theirs, name).float(), getattr(ours, name)
            assert float((found - wanted).norm() / wanted.norm()) < 0.02, (key, name)


def test_training_is_that_from_the_states_of_transformers(done: Done) -> None:
    """The answers are shared; rows and anchors are the same; only the states' rounding differs."""
    call(done.folder, "engine=huggingface", STAGES, "run.name=transformers")
    ours, theirs = done.losses("transformers"), done.losses("vllm")
    assert len(ours) == len(theirs) == 6
    assert theirs == pytest.approx(ours, rel=2e-3) and theirs != ours


def test_what_is_there_needs_no_service(done: Done) -> None:
    printed = call(done.folder, "engine=vllm", "cluster=local", "stages=[regenerate,capture]", "run.name=vllm")
    assert "starting" not in printed and "0 tokens, 0 MiB to come" in printed


def test_live_training_goes_on_when_its_server_is_killed(done: Done) -> None:
    """The answers are there, so one engine is started, and captures until training is over; killed in mid-epoch, it is
    started again, and the run is the one from what was captured through files: no sample lost, none twice."""
    longer = ("trainer.max_steps=20", "trainer.val_every_steps=20")
    call(done.folder, "engine=vllm", "cluster=local", "stages=train", "run.name=stored", *longer)
    process = start(
        done.folder, STAGES, "run.name=live", "live.window_samples=48", "engine.payload_timeout_s=10", *longer,
        experiment="live_cpu",
    )  # fmt: skip
    metrics = done.run_folder("live") / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("train/loss") < 3:
        assert process.poll() is None, finish(process)
        time.sleep(0.05)
    (server,) = [pid for pid in children(done.folder) if leads(pid, b"vllm.entrypoints.openai.api_server")]
    os.kill(server, signal.SIGKILL)
    trained = metrics.read_text().count("train/loss")
    printed = finish(process)
    assert trained < 20
    assert re.findall(r"cluster: starting (?!it again)(.*) \(", printed) == ["Mooncake", "the vLLM that captures"]
    assert re.search(
        r"vllm has ended with status 137(.|\n)*Last lines of(.|\n)*starting it again, 1 of 3 times", printed
    )
    assert done.losses("live") == pytest.approx(done.losses("stored"), rel=0.05)
    stages = {stage.name: stage for stage in read_results(done.run_folder("live")).stages}
    assert stages["capture"].events["left to live capture"] == stages["train"].num_out
    assert "live samples lost" not in stages["train"].events
    assert not children(done.folder)


def leads(pid: int, program: bytes) -> bool:
    """Whether the process runs ``program`` at the head of a process group: what its watcher has started."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return program in command and b"watcher.py" not in command and os.getpgid(pid) == pid
