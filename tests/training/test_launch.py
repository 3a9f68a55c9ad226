"""Ranks start together and end together, whatever ends them."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from dspark_lab.signals import REQUEUE, Requeue
from dspark_lab.training.launch import RankError, launch
from dspark_lab.training.place import GROUP_FOLDER, Place, cluster_environment

START = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
folder = pathlib.Path(os.environ["DSPARK_LAB_GROUP_FOLDER"])
(folder / f"pid_{rank}").write_text(str(os.getpid()))
"""


def run(code: str, folder: Path, *, num_ranks: int = 2) -> None:
    launch(
        [sys.executable, "-c", START + code],
        num_ranks=num_ranks,
        folder=folder,
        environment={"CUDA_VISIBLE_DEVICES": "1,2"},
    )


def alive(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("pid_*") if Path(f"/proc/{file.read_text()}").exists()]


def wait_for(condition, *, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def test_each_rank_knows_its_place(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")
    run(
        f"(folder / f'place_{{rank}}').write_text(' '.join(os.environ[name] for name in {names}))",
        tmp_path,
        num_ranks=3,
    )
    assert [(tmp_path / f"place_{rank}").read_text() for rank in range(3)] == [
        f"{rank} {rank} 3 127.0.0.1 1,2" for rank in range(3)
    ]


def test_a_rank_that_fails_ends_the_others_and_its_last_lines_are_told(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 ended with exit code 3; .*rank_1\.log.*the reason is this"):
        run(
            "if rank == 1:\n    print('the reason is this', file=sys.stderr)\n    sys.exit(3)\ntime.sleep(600)",
            tmp_path,
        )
    assert time.monotonic() - started < 60
    assert alive(tmp_path) == []


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 0 was killed by SIGKILL"):
        run("if rank == 0:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)", tmp_path)


def test_errors_of_rank_0_are_shown_and_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run("print('out', rank)\nprint('warned', rank, file=sys.stderr)", tmp_path)
    shown = capfd.readouterr()
    assert shown.out == "out 0\n"
    assert "warned 0" in shown.err and "warned 1" not in shown.err
    assert (tmp_path / "rank_1.log").read_text().splitlines() in (["warned 1", "out 1"], ["out 1", "warned 1"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_and_its_answer_is_passed_up(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        f"signal.signal({int(number)}, lambda *_: sys.exit({REQUEUE}))\n"
        "(folder / f'ready_{rank}').touch()\nwhile True:\n    time.sleep(0.05)"
    )

    def send() -> None:
        wait_for(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(Requeue) as caught:
        run(code, tmp_path)
    sender.join()
    assert caught.value.code == REQUEUE == 75
    assert alive(tmp_path) == []


def test_a_signal_before_a_rank_can_handle_it_is_a_requeue_too(tmp_path: Path) -> None:
    def send() -> None:
        wait_for(lambda: len(list(tmp_path.glob("pid_*"))) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(Requeue):
        run("time.sleep(600)", tmp_path)
    sender.join()


def test_no_rank_outlives_a_killed_parent(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        run("from dspark_lab.signals import die_with_parent\ndie_with_parent()\n"
            "(folder / f'ready_{rank}').touch()\ntime.sleep(600)", tmp_path)  # fmt: skip
        os._exit(0)
    wait_for(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
    assert len(alive(tmp_path)) == 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_for(lambda: not alive(tmp_path))


def test_the_place_is_read_from_what_launchers_set() -> None:
    assert Place.of({}) == Place(0, 0, 1, None)
    assert Place.of({}).leads
    torchrun = Place.of({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"})
    assert (torchrun.rank, torchrun.local_rank, torchrun.num_ranks, torchrun.leads) == (5, 1, 8, False)
    ours = Place.of({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", GROUP_FOLDER: "/f"})
    assert ours.group_folder == Path("/f") and not ours.leads
    srun = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    assert Place.of(srun) == Place(3, 0, 4, None)
    # A batch script of a job with four tasks is one process, not one of four ranks.
    assert Place.of({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == Place(0, 0, 1, None)


def test_inside_a_slurm_allocation_lightning_does_not_take_the_pipeline_for_a_rank(monkeypatch) -> None:
    for name, value in {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert type(cluster_environment()).__name__ == "LightningEnvironment"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert type(cluster_environment()).__name__ == "SLURMEnvironment"
    assert not cluster_environment().auto_requeue  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setenv(GROUP_FOLDER, "/f")
    assert type(cluster_environment()).__name__ == "LightningEnvironment"
