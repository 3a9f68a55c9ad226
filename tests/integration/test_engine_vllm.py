"""A real vLLM answers, is probed, and captures for the disk store; DSpark trains from its states as from Transformers'."""

import json
import os
import re
import subprocess
import sys
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

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / name

    def losses(self, name: str) -> list[float]:
        lines = [json.loads(line) for line in (self.run_folder(name) / "metrics.jsonl").read_text().splitlines()]
        return [value for line in lines for key, value in line.get("metrics", line).items() if key == "train/loss"]


def call(folder: Path, *overrides: str, experiment: str = "smoke") -> str:
    command = [
        *(sys.executable, "-m", "dspark_lab", f"+experiment={experiment}"),
        *SMALL,
        *(f"run.root={folder / 'runs'}", *overrides),
    ]
    environment = {**os.environ, "DSPARK_LAB_HOME": str(folder / "home"), "COLUMNS": "120"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    folder = tmp_path_factory.mktemp("engine")
    yield Done(folder, call(folder, "engine=vllm", "cluster=local", STAGES, "run.name=vllm"))


def test_every_service_is_started_once_and_gone_with_the_run(done: Done) -> None:
    assert re.findall(r"cluster: starting (.*) \(", done.printed) == [
        "the vLLM that answers", "Mooncake", "the vLLM that captures",
    ]  # fmt: skip
    assert sorted(path.name for path in (done.run_folder("vllm") / "logs").iterdir()) == [
        "mooncake_master.log", "mooncake_segment.log", "vllm.log",
    ]  # fmt: skip
    home = f"DSPARK_LAB_HOME={done.folder / 'home'}".encode()  # every child's own
    assert not [pid for pid, environment in environments() if home in environment.split(b"\0")]


def environments() -> Iterator[tuple[str, bytes]]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            yield path.parent.name, path.read_bytes()


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


def test_live_training_with_services_of_its_own(done: Done) -> None:
    """The answers are there, so one engine is started, and captures until training is over."""
    printed = call(done.folder, STAGES, "run.name=live", experiment="live_cpu")
    assert re.findall(r"cluster: starting (.*) \(", printed) == ["Mooncake", "the vLLM that captures"]
    assert done.losses("live") == pytest.approx(done.losses("vllm"), rel=0.05)
    stages = {stage.name: stage for stage in read_results(done.run_folder("live")).stages}
    assert stages["capture"].events["left to live capture"] == stages["train"].num_out
    assert stages["train"].events["live samples used"] >= stages["train"].num_out // 2
    home = f"DSPARK_LAB_HOME={done.folder / 'home'}".encode()
    assert not [pid for pid, environment in environments() if home in environment.split(b"\0")]
