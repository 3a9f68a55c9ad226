"""A server is examined with a few prompts of the run before it is used; its own faults are no verdict."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import pytest
import torch

from dspark_lab.capture.endpoint import NotAdmittedError, RefusedError, ServerFailure
from dspark_lab.capture.probe import Probe, ProbeRecipe
from dspark_lab.capture.protocol import CaptureError
from dspark_lab.records import TargetSample, TokenizedConversation
from dspark_lab.target.huggingface import HuggingFaceTarget

RECIPE = ProbeRecipe(num_prompts=2, max_tokens=40, forward=True, tolerance=0.05)


class InProcess:
    """What a capture client is to a probe, over the target in this process."""

    def __init__(self, target: HuggingFaceTarget) -> None:
        self.target = target
        self.last = 4  # the layer entered by the "last" state

    def ask(self, conversation: TokenizedConversation, **further: Any) -> dict[str, Any]:
        assert further == {"prompt_logprobs": 1, "logprobs": 1, "return_token_ids": True}
        ((_, sample),) = self.target.capture([conversation])
        logprobs, best = self.target.head().logits(sample.last_hidden_state).log_softmax(-1).max(-1)
        told = [{str(int(i)): {"logprob": float(p), "rank": 1}} for i, p in zip(best, logprobs, strict=True)]
        choice = {
            "prompt_logprobs": [None, *told[:-1]],
            "token_ids": [int(best[-1])],
            "logprobs": {"token_logprobs": [float(logprobs[-1])]},
        }
        return {"choices": [choice], "kv_transfer_params": {"handle": "h"}}

    def take(self, conversation: TokenizedConversation, described: Any) -> TargetSample:
        ((_, sample),) = self.capture([conversation])
        return sample

    def capture(self, conversations: Sequence[TokenizedConversation]) -> list[tuple[str, TargetSample]]:
        found = dict(self.target.capture(conversations))
        if self.last == 3:
            for key, sample in found.items():
                found[key] = TargetSample(
                    sample.token_ids, sample.loss_mask, sample.hidden_states, sample.hidden_states[:, -1]
                )
        return list(found.items())


@pytest.fixture
def target(tmp_path) -> HuggingFaceTarget:
    model = str(files("dspark_lab") / "assets" / "tiny")
    return HuggingFaceTarget(
        name="tiny", model=model, home=tmp_path, layer_ids=(1, 2, 3), dtype="float32", device="cpu"
    )


@pytest.fixture
def probe(target: HuggingFaceTarget) -> Probe:
    ids = torch.randint(3, 400, (64,), generator=torch.Generator().manual_seed(1))
    return Probe(target, [TokenizedConversation("c", ids, torch.ones(64, dtype=torch.bool))], RECIPE)


def test_a_right_server_is_admitted_and_the_network_let_go_of(probe: Probe, target: HuggingFaceTarget) -> None:
    assert "model" not in target.__dict__
    probe.examine(InProcess(target))  # pyright: ignore[reportArgumentType]


def test_a_wrong_one_is_not(probe: Probe, target: HuggingFaceTarget) -> None:
    client = InProcess(target)
    client.last = 3
    with pytest.raises(NotAdmittedError, match=r"^probe: the last state is another one: .* last layer missing"):
        probe.examine(client)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("cause", "raised"),
    [(ServerFailure("gone"), ServerFailure), (RefusedError("too long"), NotAdmittedError), (None, NotAdmittedError)],
)
def test_a_server_that_fails_meanwhile_is_not_judged(
    probe: Probe, target: HuggingFaceTarget, cause: Exception | None, raised: type[Exception]
) -> None:
    client = InProcess(target)

    def fail(*args: Any, **further: Any) -> Any:
        raise CaptureError("no states", reason="engine") from cause

    client.ask = fail
    with pytest.raises(raised):
        probe.examine(client)  # pyright: ignore[reportArgumentType]
