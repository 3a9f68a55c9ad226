"""Faults put into samples of the tiny target are told by their cause."""

import re
from dataclasses import replace
from importlib.resources import files

import pytest
import torch
from torch import Tensor

from dspark_lab.capture.diagnosis import Observation, find_fault
from dspark_lab.capture.probe import ProbeRecipe, choose_prompts, every_state, parse_logprobs
from dspark_lab.records import TargetSample, TokenizedConversation
from dspark_lab.target.huggingface import HuggingFaceTarget
from dspark_lab.target.protocol import TargetHead

LAYER_IDS = (1, 2, 3)  # of 4
NUM_TOKENS = 96


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTarget:
    model = str(files("dspark_lab") / "assets" / "tiny")
    home = tmp_path_factory.mktemp("home")
    return HuggingFaceTarget(name="tiny", model=model, home=home, layer_ids=LAYER_IDS, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def token_ids() -> Tensor:
    return torch.randint(3, 400, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def every(target: HuggingFaceTarget, token_ids: Tensor) -> Tensor:
    """The forward in this process: [T, n + 1, H]."""
    return every_state(target, token_ids)


def sample_of(token_ids: Tensor, states: Tensor) -> TargetSample:
    """A server's [T, L + 1, H], in bf16."""
    states = states.to(torch.bfloat16)
    return TargetSample(token_ids, torch.ones(len(token_ids), dtype=torch.bool), states[:, :-1], states[:, -1])


def observed(token_ids: Tensor, every: Tensor, head: TargetHead, states: Tensor, *, again: Tensor | None = None):
    """A server that predicts as the target does, and captured ``states``, later ``again``."""
    logprobs, best = head.logits(every[:, -1]).log_softmax(-1).max(-1)
    together = sample_of(token_ids, states if again is None else again)
    return Observation(sample_of(token_ids, states), together, best, logprobs)


def right(every: Tensor) -> Tensor:
    return every[:, [*LAYER_IDS, 4]]


def changed(states: Tensor, tokens: slice) -> Tensor:
    """Other numbers of the same size at some tokens."""
    states = states.clone()
    states[tokens] = states[tokens].flip(-1)
    return states


def normed(states: Tensor, head: TargetHead) -> Tensor:
    return torch.cat([states[:, :-1], head.norm(states[:, -1:])], dim=1)


@pytest.mark.parametrize("with_forward", [True, False])
def test_a_right_server_has_no_fault(
    target: HuggingFaceTarget, token_ids: Tensor, every: Tensor, with_forward: bool
) -> None:
    seen = observed(token_ids, every, target.head(), right(every))
    reference = every if with_forward else None
    assert find_fault(seen, head=target.head(), layer_ids=LAYER_IDS, reference=reference, tolerance=0.03) is None


FAULTS = {
    "ids shifted by one": (lambda every, head: every[:, [2, 3, 4, 4]], r"layer ids are shifted by \+1.*count outputs of"),
    "ids shifted back": (lambda every, head: every[:, [0, 1, 2, 3]], r"layer ids are shifted by -1"),
    "one other layer": (
        lambda every, head: every[:, [1, 2, 2, 4]],
        "the state entering layer 3 is another one: it is the one entering layer 2",
    ),
    "last layer missing": (
        lambda every, head: every[:, [1, 2, 3, 3]],
        "it is the one entering layer 3: last layer missing; the last of eagle_aux_hidden_state_layer_ids has to be 4",
    ),
    "already normed": (lambda every, head: normed(right(every), head), "the last state is already normed"),
    "rows shifted": (
        lambda every, head: right(every).roll(1, 0),
        "stands one position later than its token: the rows are shifted by one",
    ),
    "rows shifted back": (lambda every, head: right(every).roll(-1, 0), "stands one position earlier than its token"),
    "block size mismatch": (
        lambda every, head: changed(right(every), slice(16, None)),
        r"differs from a forward .* at 80 of 96 tokens.*block size mismatch.*from token 16 on",
    ),
    "prefix caching": (
        lambda every, head: changed(right(every), slice(0, 64)),
        r"at 64 of 96 tokens.*prefix caching is on \(the first 64 tokens are wrong\)",
    ),
    "other weights": (
        lambda every, head: right(every) * (1 + 0.3 * torch.sin(torch.arange(128.0))),
        "Likely cause: other weights, another dtype",
    ),
    "slots never written": (
        lambda every, head: torch.ones_like(right(every)),
        "most of its rows are alike.*block size mismatch.*or prefix caching",
    ),
    "not finite": (lambda every, head: right(every) * torch.inf, "states are not finite"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_by_its_cause(target: HuggingFaceTarget, token_ids: Tensor, every: Tensor, fault: str) -> None:
    spoil, says = FAULTS[fault]
    seen = observed(token_ids, every, target.head(), spoil(every, target.head()))
    found = find_fault(seen, head=target.head(), layer_ids=LAYER_IDS, reference=every, tolerance=0.1)
    assert found is not None
    assert re.search(says, found), found


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("already normed", "^the last state is already normed"),
        ("rows shifted", "Likely cause: the rows are shifted by one position"),
        ("last layer missing", r"Likely cause: last layer missing .*or the server has other weights"),
        ("block size mismatch", r"engine's own next token at \d+ of 96 positions"),
    ],
)
def test_without_a_forward_the_engines_own_predictions_tell(
    target: HuggingFaceTarget, token_ids: Tensor, every: Tensor, fault: str, says: str
) -> None:
    seen = observed(token_ids, every, target.head(), FAULTS[fault][0](every, target.head()))
    found = find_fault(seen, head=target.head(), layer_ids=LAYER_IDS, reference=None, tolerance=0.1)
    assert found is not None
    assert re.search(says, found), found


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (slice(0, 48), r"captured again, among others, 48 of 96.*prefix caching is on \(the first 48"),
        (slice(64, None), "32 of 96 tokens have other states.*block size mismatch, or prompts in chunks"),
        (slice(5, 6), "1 of 96 tokens have other states"),
    ],
)
def test_states_that_depend_on_the_batch(
    target: HuggingFaceTarget, token_ids: Tensor, every: Tensor, tokens: slice, says: str
) -> None:
    states = right(every)
    seen = observed(token_ids, every, target.head(), states, again=changed(states, tokens))
    found = find_fault(seen, head=target.head(), layer_ids=LAYER_IDS, reference=every, tolerance=0.1)
    assert found is not None
    assert re.search(says, found), found


def test_prompts_are_cut_and_one_begins_another() -> None:
    recipe = ProbeRecipe(num_prompts=4, max_tokens=50, forward=True, tolerance=0.1)
    given = [TokenizedConversation(str(n), torch.arange(n), torch.ones(n, dtype=torch.bool)) for n in (3, 40, 80)]
    chosen = choose_prompts(given, recipe)
    assert [len(prompt) for prompt in chosen] == [50, 25, 40, 20]
    assert torch.equal(chosen[1].token_ids, chosen[0].token_ids[:25])
    assert [len(prompt) for prompt in choose_prompts(given[:1], recipe)] == [3, 2]
    assert len(choose_prompts(given, replace(recipe, num_prompts=1))) == 1


def test_the_engines_predictions_are_read_from_its_reply() -> None:
    """As vLLM 0.32 replies: the first token is predicted from nothing, the last prediction is the answer itself."""
    reply = {
        "choices": [
            {
                "prompt_logprobs": [
                    None,
                    {"7": {"logprob": -9.0, "rank": 99}, "5": {"logprob": -0.5, "rank": 1}},
                    {"8": {"logprob": -0.25, "rank": 1}},
                ],
                "token_ids": [4],
                "logprobs": {"token_logprobs": [-2.0]},
            }
        ]
    }
    best, logprobs = parse_logprobs(reply)
    assert best.tolist() == [5, 8, 4] and logprobs.tolist() == [-0.5, -0.25, -2.0]
