"""The figure of a study: every algorithm is in it, and a run that cannot be drawn is named."""

import sys
from pathlib import Path
from shutil import copytree

import figure
import pytest
from synthetic_runs import make_run

from dspark_lab.report.metrics_log import METRICS_FILE
from dspark_lab.report.results import RESULTS_FILE


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figure")
    for drafter, seed in (("dspark", 1), ("dspark", 2), ("eagle3", 1)):
        make_run(folder / f"{drafter}-{seed}", drafter, seed=seed)
    return folder


@pytest.fixture
def runs(whole: Path, tmp_path: Path) -> Path:
    return copytree(whole, tmp_path / "runs")


def draw(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["figure.py", *map(str, arguments)])
    figure.main()


def test_it_is_the_same_file_each_time_and_names_each_algorithm(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = [tmp_path / f"{number}.svg" for number in range(2)]
    for out in drawn:
        draw(monkeypatch, whole, out, "--compute")
    first, second = (out.read_text() for out in drawn)
    assert first == second
    assert all(f"<!-- {told} -->" in first for told in ("dspark", "eagle3", "training tokens", "training FLOPs"))


def test_a_run_without_curve_is_named(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runs / "dspark-2" / METRICS_FILE).unlink()
    with pytest.raises(ValueError, match=r"dspark-2 has no val/acceptance_length_estimate: train it with"):
        draw(monkeypatch, runs, runs.parent / "out.svg")


def test_compute_needs_the_flops_of_every_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = runs / "eagle3-1" / RESULTS_FILE
    results.write_text(results.read_text().replace("train_flops", "other_flops"))
    with pytest.raises(ValueError, match="eagle3-1 has no train_flops: train it again, or leave out --compute"):
        draw(monkeypatch, runs, runs.parent / "out.svg", "--compute")
