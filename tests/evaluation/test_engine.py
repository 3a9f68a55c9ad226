"""What an engine tells of its drafting: counters, and the verify steps of each answer."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from dspark_lab.evaluation.engine import Answer, DraftCounters, Served, serve_prompts
from dspark_lab.records import Sampling, TokenizedConversation

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="a \\"b\\""}} {drafts}.0
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="a"}} 1.2e+01
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="a"}} {accepted}.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="a",position="10"}} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="a",position="9"}} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="a",position="0"}} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="1",model_name="a",position="0"}} 2.0
# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} 1.0
"""


def prompt(name: str = "p", *, length: int = 4) -> TokenizedConversation:
    return TokenizedConversation(name, torch.arange(length), torch.zeros(length, dtype=torch.bool), "sums")


def reply(token_ids: list[int], accepted: list[int] | None) -> dict[str, Any]:
    drafting = {"per_step_accepted": accepted, "per_step_drafted": accepted and [3] * len(accepted)}
    return {
        "choices": [{"token_ids": token_ids}],
        "metrics": {
            "queue_time_ms": 50.0,
            "time_to_first_token_ms": 200.0,
            "generation_time_ms": 500.0,
            "speculative_decoding": drafting,
        },
    }


def test_counters() -> None:
    found = DraftCounters.parse(METRICS.format(drafts=4, accepted=6))
    # Positions in the order of their numbers, engines added up.
    assert found == DraftCounters(drafts=4, draft_tokens=12, accepted_tokens=6, accepted_at=(5, 1, 0))
    earlier = DraftCounters(drafts=1, draft_tokens=3, accepted_tokens=2, accepted_at=(1, 1, 0))
    assert found.since(earlier) == DraftCounters(3, 9, 4, (4, 0, 0))


def test_a_server_without_a_drafter_has_no_counters() -> None:
    with pytest.raises(ValueError, match="does no speculative decoding"):
        DraftCounters.parse('# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 1.0\n')


def test_a_trace_ends_where_the_answer_does() -> None:
    answer = Answer.parse(reply([7, 8, 9, 10, 11], [1, 3]))
    trace = answer.trace(prompt())
    # 1 token of the prefill, 2 of the first step, 2 of the 4 of the last one.
    assert [(s.position, s.num_draft_tokens, s.num_accepted) for s in trace.steps] == [(4, 3, 1), (6, 3, 1)]
    assert (trace.prompt_id, trace.domain, trace.num_new_tokens) == ("p", "sums", 5)
    assert trace.num_accepted + len(trace.steps) + 1 == trace.num_new_tokens
    assert answer.first_token_s == 0.25


def test_an_answer_of_one_token_has_no_verify_step() -> None:
    trace = Answer.parse(reply([2], None)).trace(prompt())
    assert (trace.steps, trace.num_new_tokens) == ((), 1)


@pytest.mark.parametrize(("num_tokens", "accepted"), [(5, [1, 0]), (3, [1, 1, 0])])
def test_steps_that_do_not_make_up_the_answer_are_refused(num_tokens: int, accepted: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"p: the engine wrote {num_tokens} tokens"):
        Answer.parse(reply(list(range(num_tokens)), accepted)).trace(prompt())


@pytest.mark.parametrize("metrics", [None, {"speculative_decoding": {"num_spec_steps": 1}}])
def test_a_server_that_does_not_tell_its_steps_is_refused(metrics: dict[str, Any] | None) -> None:
    with pytest.raises(
        ValueError, match="start it with --enable-per-request-metrics --per-request-spec-decode-metrics"
    ):
        Answer.parse({**reply([1, 2], None), "metrics": metrics})


def test_speed_and_length_of_what_was_served() -> None:
    # Of four tokens the first is the prefill's; waiting counts until it. The second step's end lies beyond the answer.
    answers = (Answer.parse(reply([7, 8, 9, 10], [1, 2])), Answer.parse(reply([7, 2], [0])))
    found = Served(answers, DraftCounters(3, 9, 3, (2, 1, 0)), time_s=2.0)
    assert (found.first_token_s, found.tokens_per_s, found.tokens_per_s_per_user) == (0.25, 3.0, 4.0)
    assert found.acceptance_length == pytest.approx(4 / 3)
    # A third step, of the plain kind, is not among the steps told.
    assert (
        Served((Answer.parse(reply([7, 8, 9, 10], [1])),), DraftCounters(1, 3, 1, (1, 0, 0)), 1.0).acceptance_length
        is None
    )


def test_the_baseline_drafts_nothing() -> None:
    plain = Answer.parse(reply([7, 8, 9], None), drafts=False)
    assert (plain.drafted, plain.accepted, plain.decode_s) == ((), (), 0.5)
    assert Served((plain,), None, 1.0).acceptance_length == 1.0


class FakeServer:
    """Answers 1, 2, 3 with one verify step that accepts one of three; other clients' requests count too."""

    model = "target"

    def __init__(self, *, other_drafts: int = 0) -> None:
        self.bodies: list[Mapping[str, Any]] = []
        self.drafts = other_drafts

    def get(self, path: str, *, timeout_s: float = 1.0) -> str:
        assert path == "/metrics"
        drafts = self.drafts + len(self.bodies) if self.bodies else 0
        return METRICS.format(drafts=drafts, accepted=len(self.bodies))

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        assert path == "/v1/completions"
        self.bodies.append(body)
        return reply([1, 2, body["prompt"][0]], [1])


def served(server: FakeServer):
    prompts = [TokenizedConversation(str(n), torch.tensor([n, 5]), torch.zeros(2, dtype=torch.bool)) for n in (8, 9)]
    sampling = Sampling(temperature=0.5, top_k=4, top_p=0.9, max_new_tokens=3)
    return serve_prompts(server, prompts, sampling=sampling, eos_token_ids={2, 0}, concurrency=2, seed=1)


def test_prompts_are_sent_as_ids_and_answers_keep_their_order() -> None:
    server = FakeServer()
    found = served(server)
    assert [answer.token_ids[-1] for answer in found.answers] == [8, 9]
    assert (found.counters.drafts, found.counters.accepted_tokens) == (2, 2)
    assert sorted(body["prompt"] for body in server.bodies) == [[8, 5], [9, 5]]
    sent = {**server.bodies[0]}
    del sent["prompt"]
    assert sent == {
        "model": "target", "max_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "seed": 1,
        "stop_token_ids": [0, 2], "return_token_ids": True,
    }  # fmt: skip


def test_another_client_of_the_server_is_noticed() -> None:
    with pytest.raises(ValueError, match="does somebody else use this server"):
        served(FakeServer(other_drafts=3))
