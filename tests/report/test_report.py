import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs
from rich.console import Console
from synthetic_runs import DRAFTERS, make_run

from dspark_lab.evaluation.acceptance import acceptance_metrics
from dspark_lab.records import Trace, VerifyStep
from dspark_lab.report.algorithms import algorithm_rows
from dspark_lab.report.charts import calibration_chart
from dspark_lab.report.collect import collect
from dspark_lab.report.comparison import comparison_rows, notes
from dspark_lab.report.html import render_html, write_report
from dspark_lab.report.results import RESULTS_FILE, StageRecord, read_results, update_results
from dspark_lab.report.served import SERVED_FILE, ServedPoint
from dspark_lab.report.serving_charts import served_chart
from dspark_lab.report.table import comparison_table, rates_table, training_table
from dspark_lab.report.text import markdown
from dspark_lab.report.verdict import verdict
from dspark_lab.report.vocabulary import metric
from dspark_lab.serving.frontier_file import Curve, FrontierFile, PointRecord


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    for drafter in DRAFTERS:
        make_run(folder / drafter, drafter)
    return folder


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory) -> tuple[str, str]:
    """HTML without plotly.js, and what the console showed."""
    output = io.StringIO()
    out = tmp_path_factory.mktemp("out") / "comparison.html"
    written = write_report([runs], out, title="Three <drafters>", console=Console(file=output, width=200))
    assert written == out
    text = out.read_text()
    assert text.count(get_plotlyjs()) == 1, "plotly.js is embedded once"
    return text.replace(get_plotlyjs(), ""), output.getvalue()


def test_a_folder_a_pattern_and_the_runs_give_the_same(runs):
    each = [runs / drafter for drafter in sorted(DRAFTERS)]
    assert collect([runs]).runs == collect(each).runs == collect([f"{runs}/*", runs / "dspark"]).runs


def test_runs_two_levels_down_are_found(tmp_path):
    run = make_run(tmp_path / "sweep" / "0", "dspark")
    assert [found.directory for found in collect([tmp_path]).runs] == [run]


def test_rows_are_ranked_and_hold_both_ways(runs):
    rows = comparison_rows(collect([runs]))
    assert [row.label for row in rows] == ["eagle3", "dspark", "dflash"]
    assert [len(row.rates) for row in rows] == [3, 8, 7]
    for row in rows:
        assert row.decode.num_samples == 20 and row.replay.num_samples == 60
        assert sum(rate.value for rate in row.rates) + 1 == pytest.approx(row.decode.value)
    assert rows[0].speedup.value == pytest.approx(63.6 / 46.6)


def test_report_shows_every_number_of_the_tables(runs, report):
    html, console = report
    rows = comparison_rows(collect([runs]))
    both = (comparison_table(rows), training_table(rows), rates_table(rows), rates_table(rows, conditional=True))
    for table in both:
        assert all(cell in html for row in table.cells for cell in row)
    best = rows[0].decode
    assert f"<td>{best.value:.2f} [{best.low:.2f}, {best.high:.2f}]</td>" in html
    assert f"{best.value:.2f} " in console and f"[{best.low:.2f}, {best.high:.2f}]" in console
    for text in ("1.36x", "63.6", "46.6", "1,234,567", "3 min 20 s", "20 / 60"):
        assert text in html and text in console
    for text in (
        "4 no supervised tokens",
        "500 reused",
        "996",
        "python -m dspark_lab drafter=dspark",
        "torch 2.13.0",
        "Test CPU",
    ):
        assert text in html


def test_report_says_what_a_reader_must_know(report):
    html, console = report
    for text in (html, console):
        assert "One checkpoint per drafter: intervals are over prompts only" in " ".join(text.split())
    assert "speed-up (loop)" in html
    assert "different objectives" in html
    assert "Three &lt;drafters&gt;" in html, "the title is escaped"


def test_every_chart_is_there(report):
    html, _ = report
    names = ["acceptance", "rates", "conditional_rates", "loss_time", "loss_tokens", "val_time", "val_tokens", "speed"]
    names += ["domains", "reliability_1"]  # of these three, DSpark's confidences only
    assert sorted(re.findall(r"Plotly.newPlot\('chart-(\w+)'", html)) == sorted(names)
    assert sorted(re.findall(r'id="chart-(\w+)"', html)) == sorted(names)


def test_page_makes_no_request(report):
    html, _ = report
    assert not re.search(r"https?:|//[a-z]+\.[a-z]", html), "no address outside plotly.js's own text"
    assert not re.search(r"<(link|img|iframe|script)[^>]+(src|href)=[\"'](?!data:)", html)
    assert not re.search(r"@import|url\(", html)
    assert html.count('"showSendToCloud": false') == html.count('"plotlyServerURL": ""') == html.count("newPlot") > 0


def test_equal_runs_give_equal_pages(runs):
    assert render_html(collect([runs]), title="t") == render_html(collect([runs]), title="t")


def test_settings_are_split_into_differing_and_common(report):
    html, _ = report
    differing, common = html.split("What differs between the runs")[1].split("settings that all runs share")
    assert "drafter.num_draft_tokens" in differing and "optimizer.learning_rate" not in differing
    assert "optimizer.learning_rate" in common and "drafter.num_draft_tokens" not in common
    assert "run.name" not in differing + common


def test_markdown_is_a_table(runs):
    lines = markdown(collect([runs])).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table[0].startswith("| drafter | acceptance length, decode |")
    assert table[2].startswith("| eagle3 | ")
    assert len({line.count("|") for line in table[:5]}) == 1


def test_verdict_names_the_best_and_overlaps(runs):
    rows = comparison_rows(collect([runs]))
    text = verdict(rows)
    assert text.startswith(f"eagle3: {rows[0].decode.value:.2f} tokens per target forward (real decoding, ")
    assert text.endswith("the highest of 3.") or "overlaps" in text
    assert verdict([rows[0], rows[0]]).endswith("overlaps that of eagle3: this order is not certain.")
    assert verdict([]) == "No run has been evaluated yet."


def test_runs_of_one_drafter_are_told_apart_by_what_differs(tmp_path):
    make_run(tmp_path / "a", "dspark", learning_rate=1e-3)
    make_run(tmp_path / "b", "dspark", learning_rate=3e-4)
    make_run(tmp_path / "c", "dspark", learning_rate=3e-4, seed=1)
    labels = [row.label for row in comparison_rows(collect([tmp_path / "a", tmp_path / "b"]))]
    assert sorted(labels) == ["dspark (learning_rate=0.0003)", "dspark (learning_rate=0.001)"]
    everything = collect([tmp_path])
    assert len({row.label for row in comparison_rows(everything)}) == 3
    assert not any("One checkpoint" in note for note in notes(everything, algorithm_rows(everything)))


def test_two_settings_of_one_run_are_two_rows(tmp_path):
    run = make_run(tmp_path / "a", "eagle3")
    results = read_results(run)
    hot = [m for m in results.metrics if m.name == "acceptance_length" and m.origin == "measured"]
    hot = [type(m)(m.name, 1.5, m.unit, m.origin, {**m.setting, "temperature": 1.0}, 20, 1.4, 1.6) for m in hot]
    update_results(run, run=results.run, stage=StageRecord("evaluate_hot", 1.0), metrics=hot)
    collection = collect([run])
    rows = comparison_rows(collection)
    assert [row.setting["temperature"] for row in rows] == [0.0, 1.0]
    assert "| eagle3 | gsm_symbolic, temperature 1 | 1.50 [1.40, 1.60] |" in markdown(collection)
    assert any("differ in their evaluation setting" in note for note in notes(collection, rows))


def test_of_two_checkpoints_the_newest_is_shown_with_its_own_rates(tmp_path):
    run = make_run(tmp_path / "a", "eagle3")
    traces = [Trace("p", "math", (VerifyStep(0, 3, 0),) * 4, 5)] * 2  # never accepted: conditional rates 2, 3 undefined
    setting = {"benchmark": "gsm_symbolic", "temperature": 0.0, "num_draft_tokens": 3, "checkpoint": "step 600"}
    again = acceptance_metrics(traces, setting=setting, origin="measured")
    update_results(run, run=read_results(run).run, stage=StageRecord("evaluate_again", 1.0), metrics=again)
    collection = collect([run])
    (row,) = comparison_rows(collection)
    assert [rate.value for rate in row.rates] == [0, 0, 0]
    assert [rate.value for rate in row.conditional_rates] == [0, None, None]
    assert row.decode.value == 1.0 and row.replay.value > 1.5
    assert any("holds 2 acceptance lengths (measured" in note for note in notes(collection, [row]))
    assert "| eagle3 | 0.000 | – | – |" in markdown(collection)
    assert render_html(collection, title="t").count("Plotly.newPlot('chart-") == 8


def test_a_calibrated_run_shows_its_errors_by_position(tmp_path):
    run = make_run(tmp_path / "dspark", "dspark")
    errors = {"confidence_ece": (0.08, 0.06, 0.04), "calibrated_ece": (0.02, 0.01, 0.01)}
    found = [
        metric(f"{name}_{k}", value, origin="replayed", low=value / 2, high=value * 2)
        for name, values in errors.items()
        for k, value in enumerate(values, 1)
    ]
    results = read_results(run)
    update_results(run, run=results.run, stage=StageRecord("calibrate", 1.0), metrics=found)
    figure = calibration_chart(comparison_rows(collect([run])))
    assert figure is not None
    assert [tuple(line.y) for line in figure.data] == list(errors.values())
    assert 'id="chart-calibration"' in render_html(collect([run]), title="t")


def test_a_served_frontier_is_drawn_beside_its_baseline(tmp_path):
    run = make_run(tmp_path / "dspark", "dspark")
    measured = [(8, 1, 1.7, 60.0), (8, 4, 1.7, 55.0), (0, 1, 1.0, 46.0), (0, 4, 1.0, 44.0)]
    points = [ServedPoint(k, c, length, c * speed, speed, 0.1) for k, c, length, speed in measured]
    content = {"agrees": True, "frontier": [asdict(point) for point in points]}
    (run / SERVED_FILE).write_text(json.dumps(content))
    (found,) = collect([run]).runs
    assert found.served == tuple(points)
    figure = served_chart(found.served)
    assert figure is not None
    assert {line.name: (tuple(line.x), tuple(line.y)) for line in figure.data} == {
        "8 draft tokens": ((60.0, 55.0), (60.0, 220.0)),
        "no drafter": ((46.0, 44.0), (46.0, 176.0)),
    }
    assert 'id="chart-served_0"' in render_html(collect([run]), title="t")
    simulated = {"tokens_per_s_per_user": 50.0, "output_tokens_per_s": 50.0, "acceptance_length": 1.0}
    simulated |= {"output_tokens_per_s_per_gpu": 50.0}
    setting = {"hardware": "measured", "target": "t", "traces": "run", "acceptance": "measured", "arrivals": "closed"}
    setting |= {"step_times": "here", "prompt_tokens": 9, "output_tokens": 9, "spread": "constant"}
    curve = Curve("none", (PointRecord(1, 1, True, None, simulated),))
    FrontierFile(setting=setting, source="this run", curves=(curve,), gains=()).save(run)
    page = render_html(collect([run]), title="t")
    assert '"no drafter, simulated"' in page and "Error = simulated / measured" in page and "<td>+9%</td>" in page
    # Interpreted kernels have no speed.
    assert served_chart([replace(point, tokens_per_s=None) for point in points]) is None


def test_greedy_mismatches_are_said(tmp_path):
    run = make_run(tmp_path / "a", "eagle3")
    differing = metric("greedy_mismatch_rate", 0.05, origin="measured", num_samples=20)
    update_results(run, run=read_results(run).run, stage=StageRecord("evaluate_again", 1.0), metrics=[differing])
    assert "differs from plain decoding in 5.0 % of the prompts (eagle3)" in markdown(collect([run]))


def test_incomplete_and_broken_runs_are_named_not_dropped(tmp_path):
    make_run(tmp_path / "whole", "eagle3")
    make_run(tmp_path / "half", "dspark", evaluated=False)
    broken = make_run(tmp_path / "broken", "dflash")
    (broken / RESULTS_FILE).write_text("{")
    collection = collect([tmp_path])
    assert [row.label for row in comparison_rows(collection)] == ["eagle3", "dspark"]
    html, text = render_html(collection, title="t"), markdown(collection)
    for shown in (html, text):
        assert "demo-dspark: no acceptance length yet (stages done: capture, train)" in shown
        assert "broken" in shown and "not readable as results" in shown


def test_a_failed_stage_is_named(tmp_path):
    run = make_run(tmp_path / "a", "eagle3")
    update_results(run, run=read_results(run).run, stage=StageRecord("export", 1.0, error="disk full"))
    assert "stage export failed: disk full" in markdown(collect([run]))


def test_unevaluated_runs_still_make_a_page(tmp_path):
    make_run(tmp_path / "a", "eagle3", evaluated=False)
    html = render_html(collect([tmp_path]), title="t")
    assert "No run has been evaluated yet." in html and 'id="chart-loss_time"' in html
    assert 'id="chart-speed"' not in html


def test_errors_name_the_folder(tmp_path):
    with pytest.raises(ValueError, match=r"run folder '.*gone' does not exist"):
        write_report([tmp_path / "gone"], tmp_path / "out.html")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path)) + ".*holds no run"):
        collect([tmp_path])
    with pytest.raises(ValueError, match=r"report.runs is empty"):
        collect([])
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / RESULTS_FILE).write_text('{"schema_version": 99}')
    with pytest.raises(ValueError, match=r"(?s)none of the 1 runs can be read.*schema_version 99 is newer"):
        collect([tmp_path / "r"])
