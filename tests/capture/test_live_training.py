"""Training live, through a real Mooncake: what the store would give, whatever is killed or sent meanwhile."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from live_training import TRAIN, train_live, train_live_as_rank, train_stored
from tiny_training import in_process

from dspark_lab.cluster.services import MooncakeMaster, MooncakeSegment, answers
from dspark_lab.nearby import free_port, post_json
from dspark_lab.report.metrics_log import curve, read_metrics
from dspark_lab.signals import REQUEUE
from dspark_lab.store.mooncake_admin import object_names

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mooncake,
    pytest.mark.skipif(
        not all(map(find_spec, ("mooncake", "hs_connectors"))),
        reason="mooncake or hs-connectors is not installed: make test-services",
    ),
]
STEPS = 12


class World:
    """A master, a segment and a producer."""

    def __init__(self, folder: Path) -> None:
        self._services, self.folder = ExitStack(), folder
        self.master = self._services.enter_context(MooncakeMaster(folder=folder))
        self._services.enter_context(MooncakeSegment(self.master, folder=folder, num_bytes=2**26))
        self.port = free_port()
        self.start_producer()

    def start_producer(self) -> None:
        script = str(Path(__file__).with_name("producer.py"))
        with (self.folder / "producer.log").open("ab") as log:
            command = [sys.executable, script, str(self.port), self.master.address]
            self.producer = subprocess.Popen(command, stdout=log, stderr=log)
        until(lambda: answers(f"{self.url}/v1/models"), alive=self.producer)

    def kill_producer(self) -> None:
        self.producer.kill()
        self.producer.wait()

    def close(self) -> None:
        self.kill_producer()
        self._services.close()

    def fault(self, *kinds: str | None) -> None:
        post_json(f"{self.url}/faults", list(kinds), timeout_s=10)  # pyright: ignore[reportArgumentType]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def services(self) -> dict[str, str]:
        return {"master_address": self.master.address, "admin_url": self.master.admin_url, "url": self.url}

    @property
    def payloads(self) -> list[str]:
        return list(object_names(self.master.admin_url, prefix="cmpl-live--"))


def until(condition: Callable[[], bool], *, alive: Any = None, deadline_s: float = 90) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert alive is None or (alive.poll() if isinstance(alive, subprocess.Popen) else alive.exitcode) is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("services"))
    yield made
    made.close()


@pytest.fixture
def own_world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "services")
    yield made
    made.close()


def losses(run_dir: Path) -> Mapping[float, float]:
    found = curve(read_metrics(run_dir), "train/loss")
    return {} if found is None else dict(zip(found.step, found.value, strict=True))


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def counts(run_dir: Path) -> dict[str, int]:
    return torch.load(run_dir / "counts0.pt")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("stored")
    process = in_process(train_stored, run_dir, max_steps=STEPS)
    process.join(120)
    assert process.exitcode == 0 and len(losses(run_dir)) == STEPS
    return run_dir


def assert_same_run(run_dir: Path, stored: Path) -> None:
    """Bit for bit."""
    assert losses(run_dir) == losses(stored)
    for name, value in weights(stored).items():
        assert torch.equal(weights(run_dir)[name], value), name


def run_live(run_dir: Path, world: World, **settings: Any) -> dict[str, int]:
    process = in_process(train_live, run_dir, world.services, **{"max_steps": STEPS} | settings)
    process.join(120)
    assert process.exitcode == 0, run_dir.joinpath("error0.txt").read_text()
    return counts(run_dir)


def test_live_is_the_run_from_the_store_and_leaves_nothing(world: World, stored: Path, tmp_path: Path) -> None:
    found = run_live(tmp_path, world)
    assert_same_run(tmp_path, stored)
    assert world.payloads == []
    assert found["used"] >= len(TRAIN) and found["lost"] == found["regenerated"] == 0
    assert found["generated"] >= found["used"]


FAULTS = {
    "refused": "engine",
    "garbage": "description",
    "other ids": "token_ids",
    "nan": "non_finite",
    "short": "truncated",
    "flipped": "corrupt",
    "failed": "producer",
    "nothing": "no_payload",
}


def test_what_a_producer_spoils_is_asked_for_again(world: World, stored: Path, tmp_path: Path) -> None:
    world.fault(None, None, *FAULTS, *FAULTS)
    found = run_live(tmp_path, world)
    assert_same_run(tmp_path, stored)
    assert {reason: found[f"rejected_{reason}"] for reason in FAULTS.values()} == dict.fromkeys(FAULTS.values(), 2)
    assert found["regenerated"] == 2 * len(FAULTS) and found["lost"] == 0
    assert world.payloads == []


def test_a_producer_killed_in_mid_epoch_and_started_again(world: World, stored: Path, tmp_path: Path) -> None:
    process = in_process(train_live, tmp_path, world.services, max_steps=STEPS, val_every_steps=1)
    until(lambda: len(losses(tmp_path)) >= 2, alive=process)
    world.kill_producer()
    world.start_producer()
    process.join(120)
    assert process.exitcode == 0, tmp_path.joinpath("error0.txt").read_text()
    assert losses(tmp_path) == losses(stored)
    assert counts(tmp_path)["lost"] == 0 and world.payloads == []


def test_a_producer_that_stays_away_ends_the_training_with_a_checkpoint(
    own_world: World, stored: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = in_process(
        train_live, run_dir, own_world.services, max_steps=STEPS, recipe={"engine_deadline_s": 1.0},
        checkpoint_every_steps=1000,
    )  # fmt: skip
    until(lambda: len(losses(run_dir)) >= 2, alive=process)
    own_world.kill_producer()
    process.join(120)
    assert "LiveDataError: no engine for live.engine_deadline_s=1 s" in run_dir.joinpath("error0.txt").read_text()
    assert 2 <= len(losses(run_dir)) < STEPS and own_world.payloads == []
    own_world.start_producer()
    run_live(run_dir, own_world)
    assert_same_run(run_dir, stored)


def test_a_signal_while_training_waits_for_the_engine(own_world: World, stored: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = {"max_steps": STEPS, "checkpoint_every_steps": 1000}
    process = in_process(train_live, run_dir, own_world.services, **settings)
    until(lambda: len(losses(run_dir)) >= 2, alive=process)
    own_world.kill_producer()
    trained = -1
    while len(losses(run_dir)) != trained:  # until what was ready is used
        trained = len(losses(run_dir))
        time.sleep(2)
    assert trained < STEPS and process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(30)
    assert process.exitcode == REQUEUE and own_world.payloads == []
    own_world.start_producer()
    run_live(run_dir, own_world, **settings)
    assert losses(run_dir) == losses(stored)


def test_a_master_killed_ends_the_training_and_new_services_let_it_go_on(
    own_world: World, stored: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = in_process(
        train_live, run_dir, own_world.services, max_steps=STEPS, val_every_steps=1, checkpoint_every_steps=1000
    )
    until(lambda: len(losses(run_dir)) >= 2, alive=process)
    kill(own_world.master)
    process.join(180)
    assert process.exitcode == 1
    assert "LiveDataError: MasterUnreachableError" in run_dir.joinpath("error0.txt").read_text()
    trained = len(losses(run_dir))
    assert 2 <= trained < STEPS
    again = World(tmp_path / "again")
    try:
        run_live(run_dir, again)
    finally:
        again.close()
    assert losses(run_dir) == losses(stored)


def kill(service: Any) -> None:
    """SIGKILL to the server itself; its watcher lives on."""
    watcher = service._process.pid
    (server,) = Path(f"/proc/{watcher}/task/{watcher}/children").read_text().split()
    os.kill(int(server), signal.SIGKILL)


def test_a_trainer_killed_leaves_payloads_that_its_next_start_removes(
    world: World, stored: Path, tmp_path: Path
) -> None:
    process = in_process(train_live, tmp_path, world.services, max_steps=STEPS, checkpoint_every_steps=3)
    until(lambda: len(losses(tmp_path)) >= 5, alive=process)
    process.kill()
    process.join()
    assert world.payloads
    found = run_live(tmp_path, world, checkpoint_every_steps=3)
    assert found["orphans"] > 0 and world.payloads == []
    assert_same_run(tmp_path, stored)


def as_group(run_dir: Path, world: World, **settings: Any) -> list[int | None]:
    port = free_port()
    ranks = [
        in_process(train_live_as_rank, run_dir, world.services, rank=rank, port=port, **{"max_steps": STEPS} | settings)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.join(180)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


def test_two_ranks_share_the_window_and_stop_at_the_same_step(world: World, stored: Path, tmp_path: Path) -> None:
    """Every request fails from the tenth on; one rank notices first, both stop, and the run goes on from there."""
    world.fault(*[None] * 20, *["failed"] * 200)
    stopped = as_group(tmp_path, world, checkpoint_every_steps=1000, recipe={"num_retries": 0, "max_lost_in_a_row": 2})
    world.kill_producer()
    world.start_producer()
    assert stopped == [1, 1]
    reasons = [tmp_path.joinpath(f"error{rank}.txt").read_text() for rank in range(2)]
    assert reasons[0] == reasons[1] and "samples in a row were lost, more than live.max_lost_in_a_row=2" in reasons[0]
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert 0 < saved == len(losses(tmp_path)) < STEPS
    assert as_group(tmp_path, world) == [0, 0]
    assert world.payloads == []
    assert losses(tmp_path).keys() == losses(stored).keys()
    assert losses(tmp_path)[0] == pytest.approx(losses(stored)[0], rel=2e-5)
