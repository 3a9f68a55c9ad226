"""A run's identity, folder and lock."""

import threading
from pathlib import Path

import pytest

from dspark_lab.run import name_run, open_run

TRAINER = {"max_steps": 10, "gradient_clip": 1.0, "accumulate": 1, "devices": 1, "num_nodes": 1, "strategy": "auto"}
DATA = {"row_tokens": 64, "rows_per_batch": 4, "num_workers": 1}
CONFIG = {
    "seed": 1,
    "stages": ["train"],
    "home": "a",
    "run": {"root": "runs"},
    "logger": {"_target_": "x"},
    "store": {"reserve_bytes": 1},
    "trainer": TRAINER,
    "data": DATA,
    "target": {"hidden_size": 8, "serving": None},
    "engine": {"model": "m", "home": "a"},
    "drafter": {"num_layers": 2},
    "callbacks": {"replay": {"num_conversations": 6}, "spike_guard": {"window": 50}},
}


def named(*, num_ranks: int = 1, **changes: object) -> str:
    return name_run({**CONFIG, **changes}, experiment="smoke", drafter="dspark", num_ranks=num_ranks)[0]


def test_what_cannot_change_results_is_not_identity() -> None:
    assert named().startswith("smoke-dspark-")
    assert named() == named(
        stages="report",
        home="b",
        export={"dtype": "float32"},
        run={"root": "elsewhere", "fresh": True},
        logger={"_target_": "y"},
        store={"reserve_bytes": 2},
        trainer={**TRAINER, "max_steps": 99},
        data={**DATA, "num_workers": 3},
        target={"hidden_size": 8, "serving": {"num_layers": 2}},
        engine={"model": "m", "home": "b"},
        callbacks={"replay": None, "spike_guard": {"window": 50}, "early_stop": {"patience": 3}, "ema": None},
    )


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"drafter": {"num_layers": 3}},
        {"target": {"hidden_size": 16, "serving": None}},
        {"trainer": {**TRAINER, "gradient_clip": 0.5}},
        {"trainer": {**TRAINER, "accumulate": 2}},
        {"data": {**DATA, "rows_per_batch": 2}},
        {"engine": {"model": "other", "home": "a"}},
        {"callbacks": {"replay": None, "spike_guard": {"window": 9}}},
        {"callbacks": {**CONFIG["callbacks"], "ema": {"decay": 0.9}}},
    ],
)
def test_what_changes_results_is_identity(change: dict) -> None:
    assert named(**change) != named()


def test_the_rows_of_a_step_are_identity_and_not_how_ranks_share_them() -> None:
    two_ranks = {"trainer": {**TRAINER, "devices": 2, "strategy": "ddp"}, "data": {**DATA, "rows_per_batch": 2}}
    assert named() == named(num_ranks=2, **two_ranks)
    assert named() == named(trainer={**TRAINER, "accumulate": 2}, data={**DATA, "rows_per_batch": 2})
    assert named() != named(num_ranks=2, trainer={**TRAINER, "devices": 2})


def test_a_rank_opens_the_run_that_its_parent_holds(tmp_path: Path) -> None:
    with open_run(tmp_path, name="r", config_hash="h", fresh=False) as held:
        with open_run(tmp_path, name="r", config_hash="h", fresh=False, lock=False) as run:
            assert run == held
        with pytest.raises(ValueError, match="in use"), open_run(tmp_path, name="r", config_hash="h", fresh=False):
            pass


def test_fresh_sets_the_old_folder_aside(tmp_path: Path) -> None:
    with open_run(tmp_path, name="r", config_hash="h", fresh=False) as run:
        (run.directory / "old").touch()
    with open_run(tmp_path, name="r", config_hash="h", fresh=False) as run:
        assert (run.directory / "old").exists()
    with open_run(tmp_path, name="r", config_hash="h", fresh=True) as run:
        assert not (run.directory / "old").exists()
    assert len(list(tmp_path.glob("r.until-*/old"))) == 1


def test_a_run_in_use_is_refused(tmp_path: Path) -> None:
    with (
        open_run(tmp_path, name="r", config_hash="h", fresh=False),
        pytest.raises(ValueError, match=r"'r' is in use.*another run\.name"),
        open_run(tmp_path, name="r", config_hash="h", fresh=False),
    ):
        pass


def test_a_job_of_a_sweep_waits_for_the_run_that_another_one_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entered = threading.Event()

    def later() -> None:
        with open_run(tmp_path, name="r", config_hash="h", fresh=False, wait=True):
            entered.set()

    waiting = threading.Thread(target=later)
    with open_run(tmp_path, name="r", config_hash="h", fresh=False):
        waiting.start()
        assert not entered.wait(0.3)
    waiting.join(timeout=10)
    assert entered.is_set()
    assert "r: waiting for another job" in capsys.readouterr().out
