"""Whether a server's states are what training takes them for: looked at before the first one is used.

A few prompts are captured, alone and then all at once, and compared with the engine's own next-token distributions (through
the target's head) and, where one was made, with a forward in this process. What differs is told with its likely cause
(``diagnosis``).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from dspark_lab.capture.client import CaptureClient, CaptureError
from dspark_lab.capture.diagnosis import Observation, find_fault
from dspark_lab.capture.endpoint import NotAdmittedError, ServerFailure
from dspark_lab.records import TokenizedConversation
from dspark_lab.store.protocol import NonFiniteSampleError
from dspark_lab.target.anatomy import dissect, recording
from dspark_lab.target.huggingface import HuggingFaceTarget

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecipe:
    """``forward``: compare with one in this process. ``tolerance``: relative error of the state of one token."""

    num_prompts: Annotated[int, Field(ge=1)]
    max_tokens: Annotated[int, Field(ge=2)]
    forward: bool
    tolerance: Annotated[float, Field(gt=0)]


class Probe:
    """The probe of one capture: its prompts, and what a forward in this process makes of them, computed once."""

    def __init__(
        self, target: HuggingFaceTarget, prompts: Sequence[TokenizedConversation], recipe: ProbeRecipe
    ) -> None:
        self.head = target.head()
        self.layer_ids, self.recipe, self.prompts = target.spec.layer_ids, recipe, prompts
        if recipe.forward:
            log.info("Probe: a forward of %d prompts in this process", len(prompts))
        self.references = [every_state(target, prompt.token_ids) if recipe.forward else None for prompt in prompts]
        target.release()

    def examine(self, client: CaptureClient) -> None:
        """Capture every prompt alone, then all at once.

        Raises:
            NotAdmittedError: the first fault and its likely cause.
            ServerFailure: the server does not answer.
        """
        try:
            seen = self._observe(client)
        except (CaptureError, NonFiniteSampleError) as error:
            if isinstance(error.__cause__, ServerFailure):  # it is gone again: no verdict
                raise error.__cause__ from None
            raise NotAdmittedError(f"probe: {error}") from error
        for observation, reference in zip(seen, self.references, strict=True):
            fault = find_fault(
                observation,
                head=self.head,
                layer_ids=self.layer_ids,
                reference=reference,
                tolerance=self.recipe.tolerance,
            )
            if fault:
                raise NotAdmittedError(f"probe: {fault}")

    def _observe(self, client: CaptureClient) -> list[Observation]:
        alone = []
        for prompt in self.prompts:
            reply = client.ask(prompt, **FURTHER)
            alone.append((client.take(prompt, reply["kv_transfer_params"]), *parse_logprobs(reply)))
        together = dict(client.capture(self.prompts))
        return [
            Observation(sample, together[prompt.key], best, logprobs)
            for prompt, (sample, best, logprobs) in zip(self.prompts, alone, strict=True)
        ]


@torch.no_grad()
def every_state(target: HuggingFaceTarget, token_ids: Tensor) -> Tensor:
    """States entering each of the n layers and after the last, before the final norm: [T, n + 1, H] on the CPU."""
    anatomy = dissect(target.model)
    layer_ids = range(len(anatomy.layers))
    with recording(anatomy, layer_ids) as recorded:
        anatomy.decoder(input_ids=token_ids[None].to(target.device), use_cache=False)
    states, last = recorded.take(layer_ids)
    return torch.cat([states[0], last[0, :, None]], dim=1).cpu()


def choose_prompts(conversations: Sequence[TokenizedConversation], recipe: ProbeRecipe) -> list[TokenizedConversation]:
    """The longest ones, cut; each second one is the first half of the one before it, which a prefix cache would know."""
    longest = sorted(conversations, key=len, reverse=True)[: -(-recipe.num_prompts // 2)]
    chosen = []
    for conversation in longest:
        num_tokens = min(len(conversation), recipe.max_tokens)
        chosen += [_cut(conversation, num_tokens), _cut(conversation, -(-num_tokens // 2))]
    return chosen[: recipe.num_prompts]


def parse_logprobs(reply: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(``best``, ``logprobs``) of a reply to a request for one token with ``FURTHER``."""
    (choice,) = reply["choices"]
    found = []
    for entry in choice["prompt_logprobs"][1:]:  # the first token is predicted from nothing
        found.append(next((int(i), told["logprob"]) for i, told in entry.items() if told["rank"] == 1))
    found.append((choice["token_ids"][0], choice["logprobs"]["token_logprobs"][0]))
    best, logprobs = zip(*found, strict=True)
    return torch.tensor(best), torch.tensor(logprobs)


FURTHER = {"prompt_logprobs": 1, "logprobs": 1, "return_token_ids": True}
"""Of a request: what ``parse_logprobs`` reads."""


def _cut(conversation: TokenizedConversation, num_tokens: int) -> TokenizedConversation:
    return TokenizedConversation(
        f"probe of {conversation.id}", conversation.token_ids[:num_tokens], conversation.loss_mask[:num_tokens]
    )
