"""The W&B report as the API receives it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic_runs import make_run
from wandb_stub import Stub, wandb_stub

from dspark_lab.report.collect import collect
from dspark_lab.report.tidy import wandb_group_rows
from dspark_lab.report.wandb_report import Place, publish, sweep_axes

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::pydantic.warnings.PydanticDeprecationWarning"
)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb_stub() as stub:
        monkeypatch.setenv("WANDB_BASE_URL", stub.url)
        yield stub


def test_the_runs_of_a_group_are_numbers_like_others(stub: Stub) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    (row,) = wandb_group_rows("lab/drafts/first")
    assert row.pop("source").endswith("lab/drafts/runs/demo-dspark-1234")
    assert row == {
        "run": "demo-dspark", "drafter": "dspark", "target": "tiny", "seed": 3,
        "metric": "acceptance_length", "value": 2.5, "unit": "tokens/step", "origin": "measured",
    }  # fmt: skip
    with pytest.raises(ValueError, match="lab/drafts has no run in the group 'second'"):
        wandb_group_rows("lab/drafts/second")
    with pytest.raises(ValueError, match=r"report.wandb_groups: 'first': name it as entity/project/group"):
        wandb_group_rows("first")


def test_a_report_is_made_once_and_then_updated(tmp_path: Path, stub: Stub) -> None:
    pytest.importorskip("wandb_workspaces", reason="pip install wandb-workspaces")
    for drafter in ("eagle3", "dspark"):
        make_run(tmp_path / "runs" / drafter, drafter)
    collection = collect([tmp_path / "runs"])
    for _ in range(2):
        url = publish(collection, Place("drafts", "lab"), title="t" * 200, question="Which?", folder=tmp_path)
        assert url.startswith(stub.url) and "lab/drafts/reports" in url
    first, again = stub.mutations
    assert first["id"] is None and again["id"] == "Vmlldzox"
    assert (first["entityName"], first["projectName"], first["displayName"]) == ("lab", "drafts", "t" * 128)
    spec = first["spec"]
    for panel in ("Run History Line Plot", "Bar Chart", "Scatter Plot", "Parallel Coordinates Plot", "Run Comparer",
                  "Media Browser"):  # fmt: skip
        assert f'"{panel}"' in spec, panel
    assert "| drafter | acceptance length, decode |" in json.dumps(json.loads(spec), ensure_ascii=False)
    grid = next(block for block in json.loads(spec)["blocks"] if block["type"] == "panel-grid")
    (runset,) = grid["metadata"]["runSets"]
    assert '"group"' in json.dumps(runset["filters"]) and '"run"' in json.dumps(runset["filters"])
    assert "drafter_name" in json.dumps(runset["grouping"])


def test_the_axes_of_a_sweep(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "dspark", learning_rate=1e-3, seed=1)
    make_run(tmp_path / "b", "dspark", learning_rate=3e-4, seed=2)
    assert sweep_axes(collect([tmp_path])) == ["config.optimizer.learning_rate"]
