"""What stages=calibrate reads, writes and refuses."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from dspark_lab.configs import config_folder
from dspark_lab.evaluation.calibration import read_temperatures
from dspark_lab.evaluation.traces import save_traces
from dspark_lab.pipeline import requested_stages
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.calibrate import calibrate
from dspark_lab.records import Trace, VerifyStep
from dspark_lab.report.results import RunInfo, StageRecord, update_results
from dspark_lab.report.vocabulary import metric
from dspark_lab.run import Run


def overconfident(num_prompts=20, num_steps=60):
    """Confidences of 0.95 and 0.6 where 0.8 and 0.5 are true."""
    generator = np.random.default_rng(0)
    traces = []
    for prompt in range(num_prompts):
        steps = []
        for _ in range(num_steps):
            stands = generator.random(2) < (0.8, 0.5)
            steps.append(VerifyStep(5, 2, int(np.cumprod(stands).sum()), (0.95, 0.6)))
        traces.append(Trace(f"p{prompt}", "toy", tuple(steps), 100))
    return traces


def parts_of(tmp_path, *overrides, traces, origin="replayed", temperature=0.0):
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", list(overrides))
    run = Run("r", tmp_path, "0")
    save_traces(run.traces, {origin: traces})
    info = RunInfo("r", {}, {}, "0", "command")
    known = {"temperature": temperature, "num_draft_tokens": 2}
    measured = metric("acceptance_length", 2.0, origin=origin, setting=known)
    update_results(tmp_path, run=info, stage=StageRecord("evaluate", 1.0), metrics=[measured])
    return SimpleNamespace(run=run, calibration=build(config, "calibrate"), config=config)


def test_it_comes_after_evaluate_and_not_by_default():
    assert requested_stages(["export", "calibrate", "evaluate"]) == ["evaluate", "calibrate", "export"]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        assert "calibrate" not in compose("config").stages


def without_a_head(traces):
    return [replace(trace, steps=tuple(replace(step, confidence=None, top_probability=step.confidence)
                                       for step in trace.steps)) for trace in traces]  # fmt: skip


def test_probabilities_in_place_of_a_heads_confidences(tmp_path):
    for name in ("head", "probability"):
        (tmp_path / name).mkdir()
    by_head = parts_of(tmp_path / "head", traces=overconfident())
    by_probability = parts_of(
        tmp_path / "probability", "scheduler.confidence=probability", traces=without_a_head(overconfident())
    )
    _, metrics = calibrate(by_probability)
    assert {entry.setting["confidence"] for entry in metrics} == {"probability"}
    calibrate(by_head)
    found = read_temperatures(by_probability.run.calibration, "probability")
    assert found.tolist() == read_temperatures(by_head.run.calibration).tolist()


def test_what_it_leaves_behind(tmp_path):
    parts = parts_of(tmp_path, traces=overconfident())
    record, metrics = calibrate(parts)
    StageRecord("calibrate", 1.0, **record)  # the accounting adds up
    assert record["dropped"] == {"cut by the answer's end": 20}
    temperatures = read_temperatures(parts.run.calibration)
    calibrated = 1 / (1 + np.exp(-np.log(19) / temperatures[0]))
    assert calibrated == pytest.approx(0.8, abs=0.05)
    assert temperatures[1] > 1
    found = {entry.name: entry for entry in metrics}
    assert found["confidence_ece_1"].value == pytest.approx(0.15, abs=0.05)
    assert found["calibrated_ece_1"].value < 0.05
    assert found["confidence_temperature_2"].value == temperatures[1]
    assert found["confidence_auroc_1"].value == 0.5  # it says the same of every round
    for entry in metrics:
        assert (entry.origin, entry.num_samples) == ("replayed", 10)
        assert entry.setting["num_draft_tokens"] == 2
    saved = json.loads(parts.run.calibration.read_text())
    assert saved["setting"]["origin"] == "replayed"
    assert saved["positions"][0]["after"]["bins"][0].keys() == {"num_rounds", "survival", "accepted"}


@pytest.mark.parametrize(
    ("overrides", "options", "says"),
    [
        (["calibrate.min_rounds=600"], {}, r"590 rounds .*minimum 600"),
        ([], {"temperature": 1.0}, r"temperature 1\.0: .*calibrate\.origin=measured"),
        (["calibrate.origin=measured"], {}, r"no measured traces"),
        (["calibrate.fit_share=1"], {}, r"calibrate: fit_share=1\.0"),
        (["calibrate.lowest_temperature=9"], {}, r"calibrate: lowest_temperature=9\.0 > highest"),
    ],
)
def test_refusals(tmp_path, overrides, options, says):
    with pytest.raises(ValueError, match=says):
        calibrate(parts_of(tmp_path, *overrides, traces=overconfident(), **options))


def test_sampled_decoding_can_be_calibrated(tmp_path):
    parts = parts_of(tmp_path, "calibrate.origin=measured", traces=overconfident(), origin="measured", temperature=1.0)
    assert {entry.origin for entry in calibrate(parts)[1]} == {"measured"}
