"""Step times from what a server streams: by hand, with a server that is a clock, and what cannot be told."""

import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from dspark_lab.configs import config_folder
from dspark_lab.hardware import engine
from dspark_lab.hardware.engine import measure_engine_steps, separate_drafts, steps_together
from dspark_lab.hardware.measure import Grid
from dspark_lab.hardware.table import Measurement, TimedStep
from dspark_lab.pipeline import profile as stage

STEP_S = 0.004
COUNTERS = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total 0
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total 0
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total 0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 0
"""


def grid(**changes: Any) -> Grid:
    facts: dict[str, Any] = {"num_requests": (1, 2), "num_tokens": (1,), "num_prefill_tokens": (6,)}
    facts |= {"num_context_tokens": (16,), "warmups": 1, "repeats": 4, "endpoints": (), "num_gpus": 1}
    return Grid(**{**facts, **changes})


class Clock:
    """A server whose steps take ``STEP_S``, by a time of its own for every request; ``url`` says whether it drafts."""

    version = "0.32.0"
    local = threading.local()

    def __init__(self, url: str = "http://plain", *, targets: Any = ()) -> None:
        self.url, self.model, self.step_s = url, "m", STEP_S * (1.5 if "drafts" in url else 1)
        self.bodies: list[dict[str, Any]] = []

    @classmethod
    def now(cls) -> float:
        return getattr(cls.local, "now", 0.0)

    def get(self, path: str) -> str:
        return COUNTERS if "drafts" in self.url else "# TYPE process_cpu_seconds counter\n"

    def stream(self, path: str, body: dict[str, Any], *, timeout_s: float):
        self.bodies.append(body)
        for _ in range(body["max_tokens"]):
            self.local.now = self.now() + self.step_s
            yield json.dumps({"choices": [{"token_ids": [1]}]}).encode()
        yield b'{"choices": [], "usage": {}}'
        self.local.now = 0.0  # the next request is sent


@pytest.fixture(autouse=True)
def its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=Clock.now))


def measured(server: Any, **changes: Any) -> list[TimedStep]:
    width = changes.pop("num_draft_tokens", 0)
    return list(measure_engine_steps(server, grid(**changes), num_draft_tokens=width, vocab_size=50, seed=0))


def test_only_steps_that_all_requests_share_count() -> None:
    one, other = [0.0, 1.0, 2.0, 3.0, 4.5], [1.5, 2.0, 3.0, 4.0]
    assert sorted(steps_together([one, other], warmups=0)) == [0.5, 1.0, 1.0, 1.0]
    assert steps_together([one, other], warmups=1).tolist() == [1.0, 1.0]
    assert not len(steps_together([[0.0, 1.0], [2.0, 3.0]], warmups=0))


def test_what_a_clock_streams_is_a_step() -> None:
    server = Clock()
    steps = measured(server)
    assert [(step.num_requests, step.num_tokens) for step in steps] == [(1, 1), (2, 2), (1, 6)]
    assert [step.num_context_tokens for step in steps] == [19, 38, 0]
    np.testing.assert_allclose([step.time_s for step in steps], STEP_S)
    prompts = [tuple(body["prompt"]) for body in server.bodies if len(body["prompt"]) == 16]
    assert len(set(prompts)) == 3, "no prompt is another's prefix"
    drafting = measured(Clock(), num_draft_tokens=3)
    assert [(step.num_requests, step.num_tokens) for step in drafting] == [(1, 4), (2, 8)]


def test_a_draft_is_what_a_step_takes_beyond_its_verify() -> None:
    plain = [TimedStep(num_requests=n, num_tokens=n, num_context_tokens=0, time_s=0.01 + 0.001 * n) for n in (1, 4, 16)]
    drafted = [
        TimedStep(num_requests=n, num_tokens=4 * n, num_context_tokens=0, time_s=0.01 + 0.004 * n + draft)
        for n, draft in ((1, 0.005), (2, 0.007), (4, -0.001))
    ]
    drafts, lost = separate_drafts(plain, drafted)
    assert [draft.num_requests for draft in drafts] == [1, 2] and lost == 1
    np.testing.assert_allclose([draft.time_s for draft in drafts], [0.005, 0.007])
    with pytest.raises(ValueError, match=r"profile\.endpoints: all of them draft.*without a drafter too"):
        separate_drafts([], drafted)


def test_faults_are_told() -> None:
    silent: Any = SimpleNamespace(url="http://s", model="m", stream=lambda *a, **k: iter([b'{"error": "no room"}']))
    with pytest.raises(ValueError, match=r"http://s streamed no token: .*no room"):
        measured(silent)

    class OneByOne(Clock):
        def stream(self, path: str, body: dict[str, Any], *, timeout_s: float):
            self.local.now = 1000.0 * len(self.bodies)
            yield from super().stream(path, body, timeout_s=timeout_s)

    with pytest.raises(ValueError, match=r"2 requests never decoded together.*--max-num-seqs"):
        measured(OneByOne(), num_requests=(2,))


def test_the_stage_stores_steps_and_drafts_of_its_endpoints(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["profile.num_prefill_tokens=[6]", "profile.repeats=4", "profile.num_context_tokens=[16]",
                 "profile.num_requests=[1,2]", "profile.num_gpus=8"]  # fmt: skip
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        both, first, second = (
            compose("config", [*overrides, f"profile.endpoints=[{urls}]"])
            for urls in ("http://plain,http://drafts", "http://plain", "http://drafts")
        )
    monkeypatch.setattr(stage, "RunningVllm", Clock)
    target = SimpleNamespace(spec=SimpleNamespace(name="t", vocab_size=50), resolved=SimpleNamespace(folder="f"))
    info = SimpleNamespace(choices={"engine": "huggingface"}, machine="here")
    run = SimpleNamespace(name="r", directory=tmp_path)

    def profiled(config: Any):
        return stage.profile(SimpleNamespace(config=config, target=target, info=info, run=run))  # pyright: ignore

    with pytest.raises(ValueError, match=r"profile\.endpoints: all of them draft"):
        profiled(second)
    record, metrics = profiled(both)
    assert record["num_in"] == 3
    stored = Measurement.load(tmp_path / "profile.json")
    assert [step.num_tokens for step in stored.steps] == [1, 2, 6]
    assert [draft.num_requests for draft in stored.drafts] == [1, 2]
    np.testing.assert_allclose([draft.time_s for draft in stored.drafts], 0.5 * STEP_S)
    assert stored.num_gpus == 8
    assert stored.setting["engine"] == "vllm 0.32.0" and stored.setting["num_draft_tokens"] == 2
    assert {entry.name for entry in metrics} == {"profile_fit_error", "profile_step_time_s", "profile_draft_time_s"}
    profiled(first)
    assert Measurement.load(tmp_path / "profile.json").drafts == ()
    profiled(second)  # on the same GPUs, after it
    later = Measurement.load(tmp_path / "profile.json")
    assert (later.steps, later.drafts) == (stored.steps, stored.drafts)
