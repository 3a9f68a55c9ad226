"""stages=simulate: no target is loaded, everything says simulated, and what cannot be is refused by name."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dspark_lab.configs import config_folder
from dspark_lab.evaluation.traces import save_traces
from dspark_lab.hardware.protocol import HardwareProfile
from dspark_lab.pipeline.batches import step_times
from dspark_lab.pipeline.simulate import simulate
from dspark_lab.records import Trace, VerifyStep
from dspark_lab.report.html import write_report
from dspark_lab.report.results import RunInfo, StageRecord, update_results
from dspark_lab.report.vocabulary import metric
from dspark_lab.serving.frontier_file import FrontierFile, together

SHORT = ("simulate.loads=[1,4]", "simulate.duration_s=12", "simulate.warmup_s=3", "simulate.seeds=[1]",
         "simulate.prompt_tokens=100", "simulate.output_tokens=50", "simulate.baselines=[none,mtp1]")  # fmt: skip
PUBLISHED = ("hardware=gb300_nvl72", "target=kimi_k3", "traces=published/kimi_k3", *SHORT)


class WhileItPays:
    """A scheduler that looks at step times, as small as can be."""

    confidence = "head"

    def __init__(self, *, hardware: HardwareProfile) -> None:
        assert hardware.draft_time_s(num_requests=1) > 0

    def draft_lengths(self, confidence, load, *, num_draft_tokens):
        return (np.cumprod(confidence, 1) > 0.3).sum(1)


def parts(folder: Path, *overrides: str, scheduler: dict[str, Any] | None = None, name: str = "while_it_pays") -> Any:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", list(overrides))
    OmegaConf.set_struct(config, False)
    if not any(word.startswith("scheduler=") for word in overrides):
        config.scheduler = scheduler or {"_target_": "test_simulate_stage.WhileItPays"}
    hardware = next((word.partition("=")[2] for word in overrides if word.startswith("hardware=")), "cpu")
    return SimpleNamespace(
        config=config,
        run=SimpleNamespace(directory=folder, traces=folder / "traces.jsonl", calibration=folder / "calibration.json"),
        info=SimpleNamespace(
            choices={"scheduler": name, "hardware": hardware, "drafter": "dspark", "traces": config.traces.name}
        ),
    )


def recorded(folder: Path, *, width: int = 4, head: bool = True) -> None:
    sure = (0.8,) * width
    steps = tuple(
        VerifyStep(k, width, k % (width + 1), sure if head else None, top_probability=sure) for k in range(40)
    )
    save_traces(folder / "traces.jsonl", {"measured": [Trace(name, "sums", steps, 100) for name in "ab"]})


def written(run_dir: Path) -> Path:
    (found,) = run_dir.glob("frontiers/*/frontier.json")
    return found


def test_from_published_statistics_to_a_labelled_frontier(tmp_path: Path) -> None:
    record, metrics = simulate(parts(tmp_path, *PUBLISHED))
    assert (record["num_in"], record["num_out"], record["unit"]) == (6, 6, "points")
    assert record["events"]["points that use extrapolated step times"] > 0
    assert {entry.origin for entry in metrics} == {"simulated"}
    assert {entry.setting["acceptance"] for entry in metrics} == {"published"}
    assert {entry.setting["num_gpus"] for entry in metrics if "num_gpus" in entry.setting} == {8}
    found = json.loads(written(tmp_path).read_text())
    assert found["origin"] == "simulated"
    assert "vLLM blog" in found["source"]
    assert [curve["scheme"] for curve in found["curves"]] == ["while_it_pays", "none", "mtp1"]
    with written(tmp_path).with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert {row["origin"] for row in rows} == {"simulated"}
    plain = next(row for row in rows if (row["scheme"], row["load"]) == ("none", "1.0"))
    assert float(plain["tokens_per_s_per_user"]) == pytest.approx(111, rel=0.02)
    drafted = next(row for row in rows if (row["scheme"], row["load"]) == ("while_it_pays", "1.0"))
    assert float(drafted["tokens_per_s_per_user"]) > 1.3 * float(plain["tokens_per_s_per_user"])


def test_the_report_draws_it_and_says_that_it_is_simulated(tmp_path: Path) -> None:
    record, metrics = simulate(parts(tmp_path, *PUBLISHED))
    run = RunInfo(name="r", choices={"drafter": "dspark"}, config={}, config_hash="h", command="c")
    update_results(tmp_path, run=run, stage=StageRecord("simulate", 1.0, **record), metrics=metrics)
    page = write_report([tmp_path], tmp_path).read_text()
    assert "Simulated serving" in page
    assert "simulated output tokens" in page
    assert "kimi_k3 on gb300_nvl72, traces published/kimi_k3 (published)" in page
    assert 'class="missing"' not in page
    assert "No run has been evaluated" not in page


@pytest.mark.parametrize("scheduler", ["hardware_aware", "threshold", "fixed", "oracle"])
def test_the_schedulers_of_the_config(tmp_path: Path, scheduler: str) -> None:
    _, metrics = simulate(parts(tmp_path, *PUBLISHED, f"scheduler={scheduler}", name=scheduler))
    rates = [
        entry.value
        for entry in metrics
        if entry.name == "simulated_acceptance_length" and entry.setting["scheduler"] == scheduler
    ]
    assert rates and all(value is not None and 1.5 < value < 9 for value in rates)


def test_a_calibrated_run_schedules_by_its_temperatures(tmp_path: Path) -> None:
    """Flattened to one half each, no prefix of two is likely enough for the threshold."""
    recorded(tmp_path)
    (tmp_path / "calibration.json").write_text(json.dumps({"temperatures": [1e6] * 4}))
    overrides = (
        *SHORT,
        "traces.num_parameters=1000",
        "target=smollm2_135m",
        "scheduler=threshold",
        "scheduler.survival=0.4",
    )
    _, metrics = simulate(parts(tmp_path, *overrides, name="threshold"))
    lengths = [
        entry.value
        for entry in metrics
        if entry.name == "simulated_acceptance_length" and entry.setting["scheduler"] == "threshold, survival=0.4"
    ]
    assert lengths and all(value is not None and value <= 2 for value in lengths)


def test_gains_by_load_are_told_twice_and_beside_the_oracle(tmp_path: Path) -> None:
    overrides = ("scheduler=hardware_aware", "simulate.baselines=[none,fixed,oracle]", "traces.num_draft_tokens=4",
                 "traces.acceptance_lengths={math:3.2}", "simulate.loads=[1,16]")  # fmt: skip
    record, metrics = simulate(parts(tmp_path, *PUBLISHED, *overrides, name="hardware_aware"))
    assert record["num_in"] == 2 * 7
    (found,) = FrontierFile.load_all(tmp_path)
    assert [curve.scheme for curve in found.curves] == ["hardware_aware", "none", "oracle"]
    assert [curve.scheme for curve in found.lengths] == ["fixed 1", "fixed 2", "fixed 3", "fixed 4"]
    ours, truth = ([gain for gain in found.by_load if gain.scheme == name] for name in ("hardware_aware", "oracle"))
    assert [gain.load for gain in ours] == [gain.load for gain in truth] == [1, 16]
    for gain, bound in zip(ours, truth, strict=True):
        assert gain.best_rate >= gain.one_rate and gain.over_best <= gain.over_one
        assert gain.over_best > 0.95 and bound.over_best > gain.over_best
    told = {(entry.name, entry.setting["load"]) for entry in metrics if entry.name.startswith("simulated_gain_over")}
    assert told == {(f"simulated_gain_over_{kind}_length", load) for kind in ("best", "one") for load in (1, 16)}
    assert any("the best fixed length of each load (" in sentence for sentence in found.sentences)
    assert any("oracle, which knows what will be accepted, gives" in sentence for sentence in found.sentences)


def test_probabilities_schedule_a_drafter_without_a_head(tmp_path: Path) -> None:
    recorded(tmp_path, head=False)
    common = (*SHORT, "target=smollm2_135m", "traces.num_parameters=1000", "scheduler=threshold")
    with pytest.raises(ValueError, match=r"set scheduler\.confidence=probability"):
        simulate(parts(tmp_path, *common))
    _, metrics = simulate(parts(tmp_path, *common, "scheduler.confidence=probability", name="threshold"))
    lengths = {
        entry.setting["scheduler"]: entry.value
        for entry in metrics
        if entry.name == "simulated_verified_tokens_per_step"
    }
    assert lengths["threshold, confidence=probability"] == 4  # 0.8 to the fourth is above 0.3


def test_equal_seeds_give_equal_files(tmp_path: Path) -> None:
    found = []
    for name in "ab":
        (tmp_path / name).mkdir()
        simulate(parts(tmp_path / name, *PUBLISHED))
        found.append(written(tmp_path / name).read_text())
    assert found[0] == found[1]


def test_a_runs_own_traces(tmp_path: Path) -> None:
    recorded(tmp_path)
    run = RunInfo(name="r", choices={"drafter": "dspark"}, config={}, config_hash="h", command="c")
    trained = [metric("num_parameters", 1e7, origin="measured")]
    update_results(tmp_path, run=run, stage=StageRecord("train", 1.0), metrics=trained)
    common = ("hardware=h100", "target=qwen3_8b", *SHORT)
    _, metrics = simulate(parts(tmp_path, *common))
    assert {entry.setting["traces"] for entry in metrics} == {"run"}
    assert {entry.setting["acceptance"] for entry in metrics} == {"measured"}
    assert {entry.setting["num_draft_tokens"] for entry in metrics} == {4}
    with pytest.raises(ValueError, match="rounds of run ended with fewer verified"):
        simulate(parts(tmp_path, *common, "traces.num_draft_tokens=8"))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["traces=run"], r"traces\.jsonl does not exist: add evaluate to stages"),
        (["target=qwen3_8b"], "are of target=kimi_k3, this run has target=qwen3_8b"),
        (["simulate.num_gpus=4"], "at least 8 GPUs"),
        (["simulate.num_gpus=128"], "links 72"),
        (["hardware=h100"], "does not fit into the 8 GPUs that h100 links"),
        (["simulate.warmup_s=30"], "simulate: warmup_s=30.0 leaves nothing"),
        (["simulate.loads=[1.5]"], "whole numbers"),
        (["simulate.memory_utilisation=2"], r"simulate\.memory_utilisation"),
        (["simulate.batch_tokens=100"], "batch_tokens=100 cannot hold"),
        (["target.serving.dense_parameters=-1"], r"target\.serving\.dense_parameters"),
        (["target.serving=null"], "target.serving of kimi_k3 is null"),
        (["traces.acceptance_lengths.math=12"], "acceptance_length=12.0: with num_draft_tokens=8"),
    ],
)
def test_what_cannot_be_simulated_is_refused(tmp_path: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        simulate(parts(tmp_path, *PUBLISHED, *overrides))


def test_a_trained_drafters_size_is_asked_for(tmp_path: Path) -> None:
    recorded(tmp_path)
    with pytest.raises(ValueError, match=r"traces\.num_parameters is null and this run trained no drafter"):
        simulate(parts(tmp_path, "hardware=h100", "target=qwen3_8b", *SHORT))


def test_scheduler_none_is_plain_decoding_without_a_drafter(tmp_path: Path) -> None:
    simulate(parts(tmp_path, *PUBLISHED, "simulate.baselines=[]", name="none"))
    (found,) = FrontierFile.load_all(tmp_path)
    assert [curve.scheme for curve in found.curves] == ["none"]
    assert found.gains == ()


def test_nothing_was_simulated_or_the_file_is_broken(tmp_path: Path) -> None:
    assert FrontierFile.load_all(tmp_path) == ()
    (tmp_path / "frontiers" / "x").mkdir(parents=True)
    (tmp_path / "frontiers" / "x" / "frontier.json").write_text("{}")
    with pytest.raises(ValueError, match=r"frontier\.json: not readable as a frontier"):
        FrontierFile.load_all(tmp_path)


def test_schedulers_of_one_setting_share_a_chart(tmp_path: Path) -> None:
    for name, scheduler in (("fixed", "fixed"), ("threshold", "threshold")):
        simulate(parts(tmp_path, *PUBLISHED, f"scheduler={scheduler}", name=name))
    (chart,) = together(FrontierFile.load_all(tmp_path))
    assert [curve.scheme for curve in chart.curves] == ["fixed", "threshold", "none", "mtp1"]
    assert len(chart.sentences) == 4


def test_one_scheduler_with_two_settings_stands_side_by_side(tmp_path: Path) -> None:
    for setting in ((), ("scheduler.survival=0.6",)):
        simulate(parts(tmp_path, *PUBLISHED, "scheduler=threshold", *setting, name="threshold"))
    (merged,) = together(FrontierFile.load_all(tmp_path))
    assert {curve.scheme for curve in merged.curves[:2]} == {"threshold", "threshold, survival=0.6"}


def test_decoding_in_batches_takes_the_step_times_of_the_runs_own_hardware(tmp_path: Path) -> None:
    recorded(tmp_path)
    common = (*SHORT, "target=smollm2_135m", "traces.num_parameters=1000")
    assert step_times(parts(tmp_path, *common, "scheduler=threshold", name="threshold")) is None
    profile = step_times(parts(tmp_path, *common, "scheduler=hardware_aware", "hardware=cpu", name="hardware_aware"))
    assert profile.draft_time_s(num_requests=1) > 0
