"""A study of several seeds: what its report claims, shows and draws."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chromium import chromium, look
from synthetic_runs import make_run

from dspark_lab.evaluation.hierarchy import SeedCounts, compare, spread
from dspark_lab.report.algorithms import algorithm_rows, comparisons, domain_lengths
from dspark_lab.report.collect import collect
from dspark_lab.report.html import write_report
from dspark_lab.report.jobs import JobRecord, add_job
from dspark_lab.report.recompute import recompute
from dspark_lab.report.results import RESULTS_FILE
from dspark_lab.report.table import comparison_table
from dspark_lab.report.text import markdown
from dspark_lab.report.tidy import tidy_rows, write_table
from dspark_lab.report.verdict import verdict


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "runs"
    for seed in (1, 2, 3):
        make_run(folder / f"eagle3-{seed}", "eagle3", seed=seed)
        make_run(folder / f"dspark-{seed}", "dspark", seed=seed)
    make_run(folder / "dflash-1", "dflash", seed=1)
    return folder


@pytest.fixture(scope="module")
def page(study: Path) -> Path:
    return write_report(
        [study], study.parent / "report.html", title="A study", question="Which drafter is accepted most?"
    )


def test_runs_that_differ_in_the_seed_are_one_algorithm(study: Path) -> None:
    rows = algorithm_rows(collect([study]))
    assert {row.label: len(row.runs) for row in rows} == {"eagle3": 3, "dspark": 3, "dflash": 1}
    for row in rows:
        assert row.decode is not None and row.decode.value is not None
        lengths = [run.metric("acceptance_length", origin="measured") for run in row.runs]
        assert row.decode.value == pytest.approx(np.mean([entry.value for entry in lengths if entry]))
        assert sum(rate.value or 0 for rate in row.rates) + 1 == pytest.approx(row.decode.value)
    assert "eagle3" in comparison_table(rows).cells[0]


def test_what_was_done_with_one_seed_afterwards_makes_it_no_other_algorithm(tmp_path: Path) -> None:
    """Simulated elsewhere, read by more workers. What it was trained on or for how long does; labels say just that."""
    for seed in (1, 2, 3):
        make_run(tmp_path / f"short-{seed}", "dspark", seed=seed)
        long = make_run(tmp_path / f"long-{seed}", "dspark", seed=seed)
        later = {
            "target": {"serving": {"compute": f"bf{seed}"}},
            "hardware": {"name": seed},
            "data": {"num_workers": seed},
        }
        change_config(long, {**later, "trainer": {"max_steps": 999}})
    rows = algorithm_rows(collect([tmp_path]))
    assert {row.label: len(row.runs) for row in rows} == {"dspark (max_steps=null)": 3, "dspark (max_steps=999)": 3}


def change_config(run: Path, changed: dict[str, dict[str, object]]) -> None:
    path = run / RESULTS_FILE
    told = json.loads(path.read_text())
    for group, values in changed.items():
        told["run"]["config"].setdefault(group, {}).update(values)
    path.write_text(json.dumps(told))


def test_only_three_seeds_of_both_make_a_claim(study: Path) -> None:
    rows = algorithm_rows(collect([study]))
    found = {frozenset((entry.first, entry.second)): entry for entry in comparisons(rows)}
    assert len(found) == 3
    claim = found[frozenset(("eagle3", "dspark"))]
    assert claim.difference.p is not None and claim.difference.detectable is not None
    assert claim.num_seeds == (3, 3) and claim.num_prompts == 20
    for other in ("eagle3", "dspark"):
        silent = found[frozenset(("dflash", other))]
        assert silent.difference.p is None and silent.verdict == "one checkpoint: no claim about the algorithms"
    assert "one checkpoint: no claim" in markdown(collect([study]))
    assert verdict(rows, comparisons(rows)).startswith("eagle3: ")


def test_other_settings_or_prompts_are_not_compared(study: Path, tmp_path: Path) -> None:
    rows = algorithm_rows(collect([study / "eagle3-1", study / "dspark-1"]))
    hot = replace(rows[0], setting={**rows[0].setting, "temperature": 1.0})
    assert comparisons([hot, rows[1]]) == []


def test_acceptance_by_prompt_set(study: Path) -> None:
    found = domain_lengths(algorithm_rows(collect([study])))
    assert {(entry.label, entry.domain) for entry in found} == {
        (label, domain) for label in ("eagle3", "dspark", "dflash") for domain in ("math", "code", "chat")
    }
    assert all(entry.low is not None and entry.low <= entry.value <= (entry.high or 0) for entry in found)


def test_every_headline_number_comes_out_of_the_traces_again(study: Path) -> None:
    for run in collect([study]).runs:
        again = recompute(run)
        assert again.different == ()
        names = {entry.name for entry in again.equal}
        assert {"acceptance_length", "acceptance_rate_1", "conditional_acceptance_rate_1", "num_verify_steps"} <= names
    wrong = replace(
        run, results=replace(run.results, metrics=tuple(replace(m, value=9.0) for m in run.results.metrics))
    )
    assert any(told.startswith("acceptance_length (measured): stored 9.0") for told in recompute(wrong).different)


def test_one_tidy_table_of_all_runs(study: Path, tmp_path: Path) -> None:
    rows = tidy_rows(collect([study]))
    path = write_table(rows, tmp_path / "all.csv")
    with path.open() as file:
        read = list(csv.DictReader(file))
    lengths = [row for row in read if (row["metric"], row["origin"]) == ("acceptance_length", "measured")]
    assert len(lengths) == 7 and {row["seed"] for row in lengths} == {"1", "2", "3"}
    assert {row["config.drafter.num_draft_tokens"] for row in lengths} == {"3", "7", "8"}
    assert all(row["setting.temperature"] == "0.0" for row in lengths)
    parquet = pytest.importorskip("pyarrow.parquet")
    assert parquet.read_table(write_table(rows, tmp_path / "all.parquet")).num_rows == len(rows)
    with pytest.raises(ValueError, match=r"report\.table=.*all\.xls: end it with \.csv or \.parquet"):
        write_table(rows, tmp_path / "all.xls")


def test_a_failed_job_is_named_until_it_succeeds(study: Path) -> None:
    job = JobRecord("k", ("drafter=dspark", "seed=9"), None, error="data.row_tokens='many': not a number")
    add_job(study, job)
    assert "job drafter=dspark seed=9: data.row_tokens='many': not a number" in markdown(collect([study]))
    add_job(study, replace(job, error=None, objective=1.5))
    assert "seed=9" not in markdown(collect([study]))


def test_the_page_shows_drafts_with_their_fate(page: Path) -> None:
    text = page.read_text()
    assert "Which drafter is accepted most?" in text
    assert len(re.findall(r'class="example"', text)) == 9  # three prompts of each algorithm
    assert re.search(r'<span class="yes" style="--c: 0\.\d+" title="confidence 0\.\d\d">', text)
    assert re.search(r'<s class="no" style="--c: 1">', text), "a drafter without confidences is drawn in full colour"


def test_two_seeds_of_a_clear_winner() -> None:
    generator = np.random.default_rng(0)
    ease = generator.normal(0, 0.1, 40)

    def algorithm(mean: float) -> SeedCounts:
        chances = np.clip(mean + generator.normal(0, 0.01, 3)[:, None] + ease, 0.01, 0.99)
        return SeedCounts(generator.binomial(50, chances)[..., None].astype(float), np.full((3, 40, 1), 50.0))

    spreads = spread([algorithm(0.6), algorithm(0.4), algorithm(0.6)])
    first, same, last = compare(spreads, [3, 3, 3])
    assert first.low > 0.1 and first.p is not None and first.p < 0.05
    assert same.low < 0 < same.high and same.p is not None and same.p > 0.1
    assert last.high < -0.1
    assert first.detectable is not None and 0.01 < first.detectable < 0.1
    assert all(entry.p is None for entry in compare(spreads, [3, 3, 2]) if 2 in (entry.first, entry.second))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1320, 480])
def test_a_browser_draws_the_page_without_a_complaint(page: Path, tmp_path: Path, width: int) -> None:
    if chromium() is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    seen = look(page, width, folder=tmp_path)
    assert seen.complaints == []
    assert seen.width == width and seen.scroll_width <= width, "nothing scrolls sideways"
    assert seen.num_drawn == seen.num_charts > 8
    assert seen.right <= width
