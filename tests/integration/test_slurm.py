"""The rendered job on a real Slurm of three virtual nodes: what it starts, how it fails, how a time limit is survived."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from virtual_slurm import SUBNET, VirtualSlurm, missing_programs

from dspark_lab.cluster.slurm import Work
from dspark_lab.configs import config_folder
from dspark_lab.pipeline.build import build
from dspark_lab.report.jobs import read_jobs
from dspark_lab.report.metrics_log import curve, read_metrics
from dspark_lab.report.results import read_results

ABSENT = missing_programs()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(
        bool(ABSENT) or os.geteuid() != 0, reason=f"no Slurm to start ({ABSENT or 'not root'}): make test-services"
    ),
]
needs_services = [
    pytest.mark.mooncake,
    pytest.mark.vllm,
    pytest.mark.skipif(
        not all(map(find_spec, ("mooncake", "vllm"))), reason="mooncake or vllm is not installed: make test-services"
    ),
]

SMALL = (
    "data.train.num_prompts=24", "data.validation.num_prompts=4", "data.max_new_tokens=40", "data.num_workers=0",
    "benchmark.prompts.num_prompts=4", "trainer.max_steps=6", "trainer.val_every_steps=6", "trainer.log_every_steps=1",
)  # fmt: skip

# As `python -m dspark_lab`: a training that is never done in its first start, saves on SIGUSR1, and is done in the second.
# Everything else it is asked for is done by the real Python.
STAND_IN = """#!/bin/bash
[[ $2 == dspark_lab ]] || exec {python} "$@"
echo "$@; rank $RANK of $WORLD_SIZE by $MASTER_ADDR:$MASTER_PORT, fabric $GLOO_SOCKET_IFNAME $MOONCAKE_LOCAL_HOSTNAME"
[[ $* == *stages=train* ]] || exit 0
[[ $* == *fail-in-rank-1* ]] && if [[ $RANK == 1 ]]; then echo "no such device"; exit 7; fi
trap 'echo saved; touch {saved}; exit 75' USR1
[[ -e {saved} ]] && exit 0
while :; do sleep 0.2 & wait $!; done
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualSlurm]:
    folder = tmp_path_factory.mktemp("slurm")
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.getuid() and path != path.parent:
            path.chmod(path.stat().st_mode | 0o011)  # munge's socket has to be reachable
    made = VirtualSlurm(folder, num_nodes=3)
    yield made
    made.close()


class Job:
    """A submitted script."""

    def __init__(self, slurm: VirtualSlurm, job_id: str, folder: Path) -> None:
        self.slurm, self.id, self.folder = slurm, job_id, folder

    def log(self, name: str = "job") -> str:
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    @property
    def shown(self) -> dict[str, str]:
        return dict(re.findall(r"(\S+?)=(\S*)", self.slurm.call("scontrol", "show", "job", self.id)))

    def wait(self, happened: Callable[[], bool], *, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not happened():
            if time.monotonic() > deadline or self.shown["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
                raise AssertionError(f"{self.shown['JobState']}: {self.all_logs()}")
            time.sleep(0.3)

    def start_again(self) -> None:
        """Once it is queued again: now, instead of after Slurm's two minutes."""
        self.wait(lambda: (self.shown["JobState"], self.shown["Restarts"]) == ("PENDING", "1"), within_s=200)
        time.sleep(3)  # what Slurm signs in the second in which it ended the first start counts as revoked with it
        self.slurm.call("scontrol", "update", f"JobId={self.id}", "StartTime=now")

    def all_logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in (self.folder / "logs").glob("*.log"))

    def end(self, *, within_s: float) -> dict[str, str]:
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        deadline = time.monotonic() + within_s
        while (shown := self.shown)["JobState"] not in ended:
            assert time.monotonic() < deadline, shown["JobState"] + self.log()
            time.sleep(0.5)
        return shown


def write(folder: Path, *overrides: str, **settings: Any) -> Path:
    """A script whose lab is the stand-in."""
    python = folder / "python"
    python.write_text(STAND_IN.format(python=sys.executable, saved=folder / "saved"))
    python.chmod(0o755)
    (folder / "logs").mkdir()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        given = ["cluster=slurm", f"cluster.subnet={SUBNET}", f"cluster.roles.training.python={python}",
                 "cluster.sbatch_options=[]", "cluster.storage.segment_bytes=67108864", *overrides]  # fmt: skip
        job = build(compose("config", given), "cluster")
    told: dict[str, Any] = {
        "name": "stand-in", "folder": folder, "arguments": ("seed=1",), "before": ("capture",), "train": True,
        "after": ("report",), "num_nodes": 2, "ranks_per_node": 1, "engine": None, "stores_in_mooncake": False,
    }  # fmt: skip
    script = folder / "job.sh"
    script.write_text(job.render(Work(**{**told, **settings})))
    return script


def submit(slurm: VirtualSlurm, script: Path) -> Job:
    return Job(slurm, slurm.call("sbatch", "--parsable", str(script)).strip(), script.parent)


def test_a_time_limit_leads_to_a_checkpoint_and_to_a_second_start(slurm: VirtualSlurm, tmp_path: Path) -> None:
    """Slurm sends the signal up to a minute before it is due."""
    job = submit(slurm, write(tmp_path, "cluster.time_limit='00:01:00'", "cluster.save_before_s=50"))
    job.start_again()
    shown = job.end(within_s=90)
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1"), job.log()
    assert "time is up: the job is queued again" in job.log() and job.log().endswith(f"done: {tmp_path}\n")
    for rank, said in enumerate(map(job.log, ("rank_0", "rank_1"))):
        assert said.count("seed=1") == 2 and said.count("saved") == 1
        assert f"rank {rank} of 2 by 10.77.1.10:29500, fabric fab0 10.77.1.{10 + rank}" in said
    assert "stages=[report]" in job.log("after_training")


def test_a_rank_that_fails_ends_the_job_with_its_name_words_and_code(slurm: VirtualSlurm, tmp_path: Path) -> None:
    """Inside an allocation the script runs as it is; nothing is left of its steps."""
    script = write(tmp_path, arguments=("fail-in-rank-1",))
    command = ["salloc", "--quiet", "--nodes=2", "bash", str(script)]
    done = subprocess.run(command, env={**os.environ, **slurm.environment}, capture_output=True, text=True, timeout=90)
    assert done.returncode == 7, done.stdout + done.stderr
    assert re.search(
        r"error: rank_1 ended with exit code 7; the last lines of .*rank_1.log:\n(.*\n)*    no such device", done.stdout
    )
    await_end_of_all(tmp_path)


def await_end_of_all(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while left := processes(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def processes(folder: Path) -> list[str]:
    """Command lines that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            told = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in told and int(path.parent.name) != os.getpid():
                found.append(told)
    return found


def mooncake_masters() -> list[int]:
    """Those of virtual nodes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            told = path.read_bytes()
            if b"mooncake_master" in told.split(b"\0")[0] and b"-rpc_address=10.77.1." in told:
                found.append(int(path.parent.name))
    return found


def test_the_doctor_tries_every_way_between_the_nodes(slurm: VirtualSlurm, tmp_path: Path) -> None:
    """At the addresses in the job's subnet, where the nodes' names lead elsewhere; gb2 has lost its route to gb0."""
    with slurm.no_route(node="gb2", to="gb0"):
        command = ["srun", "--nodes=3", "--ntasks-per-node=1", sys.executable, "-m", "dspark_lab", "+experiment=smoke"]
        command += ["cluster=slurm", f"cluster.subnet={SUBNET}", "engine=vllm", "stages=doctor", f"run.root={tmp_path}"]
        environment = {**os.environ, **slurm.environment, "COLUMNS": "300", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {
        path.stem.removeprefix("doctor-"): {
            (entry["state"], entry["told"]) for entry in json.loads(path.read_text())["findings"]
            if entry["check"] == "neighbours"
        }
        for path in tmp_path.glob("*/doctor-*.json")
    }  # fmt: skip
    assert set(found) == {"gb0", "gb1", "gb2"}
    assert found["gb1"] == {("ok", "3 nodes reach each other, both ways; this is gb1 10.77.1.11")}
    for node, others in {"gb0": "gb2", "gb2": "gb0"}.items():
        ((state, told),) = found[node]
        assert state == "failed" and f"{node} 10.77.1.1{node[-1]} -> {others} 10.77.1.1{others[-1]}: " in told


def test_a_sweep_gives_every_job_a_slurm_job_of_its_own(slurm: VirtualSlurm, tmp_path: Path) -> None:
    """In parallel, over shared states and checkpoints; the sweep knows how each of them ended."""
    command = [
        sys.executable, "-m", "dspark_lab", "-m", "+experiment=smoke", *SMALL, "drafter=dflash", "trainer.max_steps=2",
        "seed=1,2", "evaluate.num_draft_tokens=3,-1", "stages=[regenerate,capture,train,evaluate]", "evaluate.mode=replay",
        f"run.root={tmp_path / 'runs'}", f"hydra.sweep.dir={tmp_path / 'sweep'}", "hydra/launcher=submitit_slurm",
        "hydra.launcher.tasks_per_node=1", "hydra.launcher.timeout_min=10",
    ]  # fmt: skip
    home = {"DSPARK_LAB_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **slurm.environment, **home}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1, done.stdout + done.stderr
    jobs = read_jobs(tmp_path / "runs")
    assert sorted(job.error is None for job in jobs) == [False, False, True, True], done.stdout + done.stderr
    runs = [read_results(path.parent) for path in (tmp_path / "runs").glob("*/results.json")]
    assert {run.run.seed for run in runs} == {1, 2}
    assert len(list((tmp_path / "sweep").glob("**/*_0_log.out"))) == 4


class TestWithServices:
    pytestmark = needs_services

    def test_a_service_that_is_killed_ends_the_job_after_training_has_saved(
        self, slurm: VirtualSlurm, tmp_path: Path
    ) -> None:
        job = submit(slurm, write(tmp_path, stores_in_mooncake=True))
        job.wait(lambda: "rank 1 of 2" in job.log("rank_1"), within_s=90)
        for pid in mooncake_masters():
            os.kill(pid, signal.SIGKILL)
        shown = job.end(within_s=90)
        assert shown["JobState"] == "FAILED" and shown["ExitCode"].split(":")[0] not in ("0", "75")
        assert re.search(
            r"error: mooncake_master ended with exit code \d+; the last lines of .*mooncake_master.log:\n    ",
            job.log(),
        )
        assert "saved" in job.log("rank_0") and "saved" in job.log("rank_1")

    def test_live_training_over_three_nodes(self, live: "Live") -> None:
        """A master, a segment and a real vLLM on one node, and a rank on each of the two others."""
        job = live.job
        assert job.end(within_s=900)["JobState"] == "COMPLETED", job.all_logs()
        assert dict(re.findall(r"(\w+) starts on (gb\d)", job.log())) == {
            "mooncake_master": "gb0", "segment_0": "gb0", "vllm_0": "gb0", "ready": "gb1", "before_training": "gb1",
            "rank_0": "gb1", "rank_1": "gb2", "after_training": "gb1",
        }  # fmt: skip
        stages = {stage.name: stage for stage in read_results(job.folder).stages}
        assert stages["capture"].events["left to live capture"] == stages["train"].num_out
        assert stages["train"].events["live samples used"] >= stages["train"].num_out // 2
        assert num_steps(job.folder) == 6
        await_end_of_all(job.folder)

    def test_training_goes_on_after_the_signal_of_a_time_limit(self, live: "Live") -> None:
        """On what the live training kept, without services: saved in both ranks, queued again, done in the second start."""
        job = live.submit(
            "stages=train", "run.name=stored", "data.source=stored", "store=disk", "trainer.max_steps=12",
            "trainer.val_every_steps=12", "trainer.checkpoint_every_steps=1000",
        )  # fmt: skip
        job.wait(lambda: num_steps(job.folder) >= 2, within_s=300)
        job.slurm.call("scancel", "--batch", "--signal=USR1", job.id)
        job.start_again()
        assert job.end(within_s=300)["JobState"] == "COMPLETED", job.all_logs()
        saved, gone_on = (
            re.findall(rf"{words} (\d+)", job.log("rank_0")) for words in ("received: step", "on from step")
        )
        assert saved == gone_on and 2 <= int(saved[0]) < 12
        assert num_steps(job.folder) == 12 and "vllm" not in job.log()


class Live:
    """A run of the command itself, submitted; its home has answers, and keeps what it captures."""

    def __init__(self, slurm: VirtualSlurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self._call("+experiment=smoke", "stages=regenerate")  # else a second engine would start
        self.job = self.submit(
            "stages=[capture,train,report]",
            "run.name=live",
            "store.keep=disk",
            "cluster.storage.segment_bytes=268435456",
        )

    def submit(self, *overrides: str) -> Job:
        printed = self._call(
            "+experiment=live_cpu", "cluster=slurm", "cluster.submit=true", f"cluster.subnet={SUBNET}",
            "cluster.sbatch_options=[]", "trainer.num_nodes=2", *overrides,
        )  # fmt: skip
        (job_id,) = re.findall(r"job (\d+) is submitted", printed)
        (name,) = (value for value in overrides if value.startswith("run.name="))
        return Job(self.slurm, job_id, self.folder / "runs" / name.removeprefix("run.name="))

    def _call(self, *overrides: str) -> str:
        home = {"DSPARK_LAB_HOME": str(self.folder / "home"), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "dspark_lab", *SMALL, f"run.root={self.folder / 'runs'}", *overrides]
        environment = {**os.environ, **self.slurm.environment, **home}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def live(slurm: VirtualSlurm, tmp_path_factory: pytest.TempPathFactory) -> Live:
    return Live(slurm, tmp_path_factory.mktemp("live"))


def num_steps(run_dir: Path) -> int:
    found = curve(read_metrics(run_dir), "train/loss")
    return 0 if found is None else len(found.value)
