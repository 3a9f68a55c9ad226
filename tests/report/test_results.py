import json
from dataclasses import replace
from pathlib import Path

import pytest

from dspark_lab.records import Metric
from dspark_lab.report.provenance import Machine, describe_machine
from dspark_lab.report.results import (
    RESULTS_FILE,
    Results,
    RunInfo,
    StageRecord,
    read_results,
    update_results,
    write_results,
)
from dspark_lab.report.vocabulary import METRICS, metric, metric_kind, vocabulary_markdown

RUN = RunInfo(
    name="demo-1a2b",
    choices={"drafter": "dspark", "target": "tiny"},
    config={"drafter": {"num_layers": 2}, "seed": 0},
    config_hash="1a2b",
    command="python -m dspark_lab drafter=dspark",
    seed=0,
)
CAPTURE = StageRecord(
    "capture", 2.5, num_in=10, num_out=7, dropped={"no_supervised_tokens": 2, "nan": 1}, events={"retried": 4}
)
LENGTH = metric(
    "acceptance_length", 1.8, origin="measured", setting={"temperature": 0.0}, num_samples=20, low=1.7, high=1.9
)


def test_round_trip(tmp_path):
    update_results(tmp_path, run=RUN, stage=CAPTURE, metrics=[LENGTH])
    assert read_results(tmp_path) == Results(RUN, (CAPTURE,), (LENGTH,))


def test_stages_add_to_the_file_and_replace_their_own(tmp_path):
    update_results(tmp_path, run=RUN, stage=CAPTURE, metrics=[metric("stored_bytes", 100, origin="measured")])
    replayed = metric("acceptance_length", 1.75, origin="replayed", setting={"temperature": 0.0})
    update_results(tmp_path, run=RUN, stage=StageRecord("evaluate", 9.0), metrics=[LENGTH, replayed])
    better = replace(LENGTH, value=1.85)
    found = update_results(tmp_path, run=RUN, stage=StageRecord("evaluate", 8.0), metrics=[better])
    assert [(stage.name, stage.time_s) for stage in found.stages] == [("capture", 2.5), ("evaluate", 8.0)]
    assert sorted((entry.name, entry.origin, entry.value) for entry in found.metrics) == [
        ("acceptance_length", "measured", 1.85),
        ("acceptance_length", "replayed", 1.75),
        ("stored_bytes", "measured", 100),
    ]
    assert read_results(tmp_path) == found


def test_a_kill_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    update_results(tmp_path, run=RUN, stage=CAPTURE)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        update_results(tmp_path, run=RUN, stage=StageRecord("train", 1.0))
    assert [stage.name for stage in read_results(tmp_path).stages] == ["capture"]


def test_accounting_identity_is_enforced():
    with pytest.raises(
        ValueError, match=r"'capture'.*10 conversations went in, but 7 came out and 2 were dropped.*other 1"
    ):
        StageRecord("capture", 1.0, num_in=10, num_out=7, dropped={"nan": 2})
    with pytest.raises(ValueError, match="num_in and num_out too"):
        StageRecord("capture", 1.0, dropped={"nan": 2})
    with pytest.raises(ValueError, match="give both"):
        StageRecord("capture", 1.0, num_in=3)
    assert StageRecord("capture", 1.0, num_in=10, num_out=3, error="disk full").error == "disk full"


def test_newer_schema_is_refused(tmp_path):
    write_results(tmp_path, Results(RUN))
    path = tmp_path / RESULTS_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))
    with pytest.raises(ValueError, match=r"results.json.*schema_version 99 is newer than 1.*update dspark_lab"):
        read_results(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 1}', '{"schema_version": 1, "run": {"machine": {}}}'])
def test_broken_results_name_the_file(tmp_path, text):
    (tmp_path / RESULTS_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"results.json: not readable as results"):
        read_results(tmp_path)


def test_missing_results_name_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"results.json does not exist"):
        read_results(tmp_path / "gone")


def test_results_of_another_configuration_are_not_mixed(tmp_path):
    update_results(tmp_path, run=RUN, stage=CAPTURE)
    with pytest.raises(ValueError, match=r"belongs to config 1a2b.*config ffff.*run.fresh=true"):
        update_results(tmp_path, run=replace(RUN, config_hash="ffff"), stage=CAPTURE)


def test_vocabulary_is_enforced(tmp_path):
    with pytest.raises(ValueError, match=r"'acceptance_lenght'.*did you mean acceptance_length"):
        metric("acceptance_lenght", 1.0, origin="measured")
    with pytest.raises(ValueError, match="'guessed': use one of measured"):
        metric("acceptance_length", 1.0, origin="guessed")
    with pytest.raises(ValueError, match="is nan: use None"):
        metric("acceptance_length", float("nan"), origin="measured")
    with pytest.raises(ValueError, match="unit 'furlongs': the vocabulary says 'tokens/step'"):
        write_results(tmp_path, Results(RUN, (), (Metric("acceptance_length", 1.0, "furlongs", "measured"),)))


def test_families_are_found():
    assert metric_kind("acceptance_rate_12") is METRICS["acceptance_rate_<k>"]
    assert metric_kind("conditional_acceptance_rate_1") is METRICS["conditional_acceptance_rate_<k>"]
    assert metric_kind("train/markov_ce") is METRICS["train/<term>"]
    with pytest.raises(ValueError, match="acceptance_rate_0"):
        metric_kind("acceptance_rate_0")


def test_docs_show_exactly_this_vocabulary():
    text = (Path(__file__).parents[2] / "docs" / "results.md").read_text()
    assert vocabulary_markdown() in text, "paste the output of vocabulary_markdown() into docs/results.md"


def test_machine():
    here = describe_machine()
    assert here.num_cores >= 1 and here.cpu and here.memory_bytes > 2**20
    assert str(Machine("EPYC", 2, 8 * 2**30, ("H200", "H200"))) == "EPYC, 2 cores, 8 GiB, 2 x H200"
    assert str(Machine("EPYC", 1, 8 * 2**30)) == "EPYC, 1 core, 8 GiB, no GPU"
