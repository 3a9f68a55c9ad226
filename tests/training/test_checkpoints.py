"""A checkpoint is whole or not used, and there is always one that is."""

import errno
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from tiny_training import in_process

from dspark_lab.training.checkpoints import LAST, PREVIOUS, CheckpointFiles, first_whole, is_whole, tensor_bytes


def state(step: int, *, size: int = 1000) -> dict:
    return {"global_step": step, "state_dict": {"w": torch.arange(size) + step}, "optimizer_states": [{"m": [step]}]}


def save(folder: Path, step: int, *, name: str = LAST, size: int = 1000) -> Path:
    CheckpointFiles().save_checkpoint(state(step, size=size), folder / name)
    return folder / name


def step_of(path: Path | None) -> int:
    assert path is not None
    return torch.load(path, weights_only=True)["global_step"]


def test_the_one_before_the_newest_is_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    save(tmp_path, 9, name="best.ckpt")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["best.ckpt", LAST, PREVIOUS]
    assert (step_of(tmp_path / LAST), step_of(tmp_path / PREVIOUS)) == (3, 2)
    assert first_whole(tmp_path) == (tmp_path / LAST, [])
    assert first_whole(tmp_path, ["best.ckpt", LAST]) == (tmp_path / "best.ckpt", [])


def test_without_hard_links_the_one_before_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    for step in (1, 2):
        save(tmp_path, step)
    assert (step_of(tmp_path / LAST), step_of(tmp_path / PREVIOUS)) == (2, 1)


def test_a_torn_checkpoint_is_passed_over_wherever_it_was_torn(tmp_path: Path) -> None:
    save(tmp_path, 1)
    whole = save(tmp_path, 2).read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        (tmp_path / LAST).write_bytes(whole[:length])
        assert first_whole(tmp_path) == (tmp_path / PREVIOUS, [tmp_path / LAST]), length
    assert step_of(tmp_path / PREVIOUS) == 1


def test_a_flipped_bit_is_found_or_harmless(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    whole = path.read_bytes()
    generator, found = random.Random(1), 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        if is_whole(path):  # padding between records
            read = torch.load(path, weights_only=True)
            assert torch.equal(read["state_dict"]["w"], state(2)["state_dict"]["w"]) and read["global_step"] == 2
        else:
            found += 1
    assert found > 150


def test_a_torn_newest_one_never_costs_the_good_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    (tmp_path / PREVIOUS).write_bytes(save(tmp_path, 1).read_bytes())
    (tmp_path / LAST).write_bytes(b"torn")
    seen = []
    replace = Path.replace

    def look(self: Path, target: Path) -> Path:
        seen.append(first_whole(tmp_path)[0])
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look)
    save(tmp_path, 2)
    assert seen and None not in seen
    assert step_of(first_whole(tmp_path)[0]) == 2


def _save_for_ever(folder: Path) -> None:
    for step in range(10_000):
        save(folder, step, size=100_000)


@pytest.mark.slow
def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    generator = random.Random(3)
    for _ in range(8):
        process = in_process(_save_for_ever, tmp_path)
        while not (tmp_path / LAST).exists():
            time.sleep(0.01)
        time.sleep(generator.uniform(0.05, 0.3))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        path, damaged = first_whole(tmp_path)
        assert path == tmp_path / LAST and not damaged
    assert {file.name for file in tmp_path.iterdir()} <= {LAST, PREVIOUS, f".{LAST}.partial", f".{PREVIOUS}.partial"}


def test_a_full_disk_names_path_and_bytes_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)

    class Full:
        """A file on a disk with room for 2000 bytes."""

        def __init__(self, file) -> None:
            self.file, self.room = file, 2000

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None:
            self.file.close()

        def write(self, data) -> int:
            self.room -= len(data)
            if self.room < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

        def flush(self) -> None:
            self.file.flush()

    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode="r": Full(opened(self, mode)))
    with pytest.raises(
        ValueError, match=rf"{tmp_path / LAST}: the disk is full: a checkpoint takes 8,000 bytes.* free"
    ):
        save(tmp_path, 3)
    monkeypatch.undo()
    assert (step_of(tmp_path / LAST), step_of(tmp_path / PREVIOUS)) == (2, 1)
    assert {file.name for file in tmp_path.iterdir()} == {LAST, PREVIOUS}


def test_other_errors_are_not_called_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / f".{LAST}.partial").mkdir()
    with pytest.raises(IsADirectoryError):
        save(tmp_path, 1)


def test_bytes_of_nested_tensors_are_counted() -> None:
    assert tensor_bytes({"a": [torch.zeros(3), {"b": torch.zeros(2, dtype=torch.int64)}], "c": 5}) == 28
