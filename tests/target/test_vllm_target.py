"""What a target asks of its servers and makes of their replies; what they compute is tested with a real vLLM."""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from small_server import SmallServer, small_servers

from dspark_lab.capture.endpoint import EndpointError
from dspark_lab.capture.probe import ProbeRecipe
from dspark_lab.cluster.local import AttachedCluster
from dspark_lab.records import Conversation, Sampling
from dspark_lab.store.mooncake_connection import MooncakeConnection
from dspark_lab.target.chat import tokenize_prompt
from dspark_lab.target.huggingface import HuggingFaceTarget
from dspark_lab.target.vllm import VllmTarget

NOWHERE = MooncakeConnection(
    master_address=None, admin_url=None, protocol="tcp", rdma_devices="", local_hostname="127.0.0.1"
)
SAMPLING = Sampling(temperature=0.7, top_p=0.9, max_new_tokens=4)
PROMPTS = [Conversation(f"p{n}", ({"role": "user", "content": f"{n} + {n}"},)) for n in range(6)]


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTarget:
    model = str(files("dspark_lab") / "assets" / "tiny")
    return HuggingFaceTarget(name="tiny", model=model, home=tmp_path_factory.mktemp("home"), layer_ids=(1, 2, 3))


@pytest.fixture
def server(in_process: HuggingFaceTarget) -> Iterator[SmallServer]:
    """Answers 5, 6 and the end token."""
    with small_servers(1) as (small,):
        small.answer = lambda body: reply([5, 6, in_process.spec.eos_token_ids[0]], "stop")
        yield small


def reply(token_ids: Sequence[int] | None, finish: str) -> dict[str, Any]:
    return {"choices": [{"token_ids": token_ids, "finish_reason": finish}]}


def target_of(in_process: HuggingFaceTarget, *servers: SmallServer, **settings: Any) -> VllmTarget:
    given = {
        "endpoints": tuple(server.url for server in servers),
        "endpoints_file": None,
        "payload_folder": None,
        "dtype": "bfloat16",
        "concurrency": 3,
        "timeout_s": 5.0,
        "payload_timeout_s": 5.0,
        "patience_s": 5.0,
        "seed": 1,
        "probe": ProbeRecipe(num_prompts=2, max_tokens=50, forward=False, tolerance=0.1),
    }
    cluster = AttachedCluster(mooncake=NOWHERE)
    return VllmTarget(in_process=in_process, cluster=cluster, namespace="run", **{**given, **settings})


def test_ids_go_in_and_ids_come_out(in_process: HuggingFaceTarget, server: SmallServer) -> None:
    target = target_of(in_process, server)
    eos = in_process.spec.eos_token_ids[0]
    found = {answer.id: answer for answer in target.regenerate(PROMPTS, sampling=SAMPLING)}
    assert found.keys() == {prompt.id for prompt in PROMPTS}
    for prompt in PROMPTS:
        answer = found[prompt.id]
        assert answer.answer_token_ids == (5, 6, eos) and answer.finish == "stop"
        assert answer.sampling == SAMPLING and answer.messages == prompt.messages
    admission, *asked = server.served
    assert admission["max_tokens"] == 1
    assert sorted(body["prompt"] for body in asked) == sorted(
        tokenize_prompt(prompt.messages, in_process.tokenizer) for prompt in PROMPTS
    )
    told = {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "max_tokens": 4, "return_token_ids": True, "min_p": 0.0}
    assert all(told.items() <= body.items() and body["stop_token_ids"] == [eos] for body in asked)
    assert target.take_events() == {"servers admitted": 1} and not target.take_events()


def test_each_prompt_has_its_own_random_numbers(in_process: HuggingFaceTarget, server: SmallServer) -> None:
    def seeds(prompts: list[Conversation], **settings: Any) -> dict[tuple[int, ...], int]:
        server.served.clear()
        list(target_of(in_process, server, **settings).regenerate(prompts, sampling=SAMPLING))
        return {tuple(body["prompt"]): body["seed"] for body in server.served if "seed" in body}

    every = seeds(PROMPTS)
    assert len(set(every.values())) == len(PROMPTS)
    assert seeds(PROMPTS[3:]).items() <= every.items()
    assert not set(seeds(PROMPTS, seed=2).values()) & set(every.values())
    server.served.clear()
    list(target_of(in_process, server).regenerate(PROMPTS, sampling=Sampling(max_new_tokens=4)))
    assert not any("seed" in body for body in server.served)


def test_requests_under_way_are_limited(in_process: HuggingFaceTarget, server: SmallServer) -> None:
    server.delay_s = 0.1
    answers = target_of(in_process, server).regenerate(PROMPTS, sampling=SAMPLING)
    next(answers)
    assert len(server.served) <= 1 + 1 + 3  # admission, the answer, and those under way
    answers.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert server.most_under_way == 3 and len(server.served) < 1 + len(PROMPTS)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (reply(None, "stop"), "returned no token_ids"),
        (reply([5, 6], "stop"), r"stopped by 'stop' after 2 tokens, .* stand at \[\]"),
        (reply([5, 6], "length"), "stopped by 'length' after 2 tokens.*max_new_tokens is 4"),
        (reply([5, 2, 6, 7], "length"), r"stand at \[1\]"),
    ],
)
def test_an_answer_that_does_not_end_as_it_says(
    in_process: HuggingFaceTarget, server: SmallServer, told: dict[str, Any], says: str
) -> None:
    assert in_process.spec.eos_token_ids == (2,)
    server.answer = lambda body: told
    with pytest.raises(ValueError, match=says):
        list(target_of(in_process, server).regenerate(PROMPTS[:1], sampling=SAMPLING))


def test_an_answer_of_full_length(in_process: HuggingFaceTarget, server: SmallServer) -> None:
    server.answer = lambda body: reply([5, 6, 7, 8], "length")
    (answer,) = target_of(in_process, server).regenerate(PROMPTS[:1], sampling=SAMPLING)
    assert answer.answer_token_ids == (5, 6, 7, 8) and answer.finish == "length"


def test_servers_that_capture_do_not_answer(in_process: HuggingFaceTarget, server: SmallServer) -> None:
    with small_servers(1) as (capturing,):
        capturing.answer = lambda body: {**reply([5], "length"), "kv_transfer_params": {"handle": "h"}}
        list(target_of(in_process, capturing, server).regenerate(PROMPTS, sampling=SAMPLING))
        assert len(capturing.served) == 1 and len(server.served) == 1 + len(PROMPTS)
        with pytest.raises(EndpointError, match=r"none is admitted.*it captures hidden states"):
            list(target_of(in_process, capturing).regenerate(PROMPTS, sampling=SAMPLING))


def test_what_is_too_long_is_refused_before_anything_is_asked(
    in_process: HuggingFaceTarget, server: SmallServer
) -> None:
    with pytest.raises(ValueError, match=r"'p0' needs .* the target tiny has 1024 positions"):
        list(target_of(in_process, server).regenerate(PROMPTS, sampling=Sampling(max_new_tokens=1020)))
    assert not server.served


def test_without_servers(in_process: HuggingFaceTarget) -> None:
    with pytest.raises(
        ValueError, match=r"name some \(engine.endpoints\), or let this run start one \(cluster=local\)"
    ):
        list(target_of(in_process).regenerate(PROMPTS, sampling=SAMPLING))


def test_the_rest_is_the_target_in_this_process(in_process: HuggingFaceTarget, tmp_path: Path) -> None:
    target = target_of(in_process)
    assert target.spec == in_process.spec and target.tokenizer is in_process.tokenizer
    assert target.head().lm_head.shape == in_process.head().lm_head.shape
    assert target.dtype == in_process.dtype and target.resolved == in_process.resolved
