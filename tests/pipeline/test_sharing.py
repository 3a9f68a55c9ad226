"""Runs in parallel that need the same answers or states."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_lab.pipeline.sweep import sharing


def parts(home: Path, *, states: str = "s", store: str = "disk") -> Any:
    return SimpleNamespace(
        home=home,
        info=SimpleNamespace(choices={"store": store}),
        manifest=SimpleNamespace(content_hash=states),
        target=SimpleNamespace(spec=SimpleNamespace(fingerprint="f")),
    )


def waits(held: Any, other: Any, stage: str) -> bool:
    """Whether ``other`` enters ``stage`` only after ``held`` has left it; it does enter in the end."""
    entered = threading.Event()

    def later() -> None:
        with sharing(other, stage):
            entered.set()

    thread = threading.Thread(target=later)
    with sharing(held, stage):
        thread.start()
        waited = not entered.wait(0.3)
    thread.join(timeout=10)
    assert entered.is_set()
    return waited


def test_one_makes_what_both_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert waits(parts(tmp_path), parts(tmp_path), "regenerate")
    assert waits(parts(tmp_path), parts(tmp_path), "capture")
    assert capsys.readouterr().out.count("waiting for another run that is at it") == 2


def test_what_is_not_shared_is_not_waited_for(tmp_path: Path) -> None:
    assert not waits(parts(tmp_path), parts(tmp_path, states="others"), "capture")
    assert not waits(parts(tmp_path, store="memory"), parts(tmp_path, store="memory"), "capture")
    assert not waits(parts(tmp_path), parts(tmp_path), "train")
