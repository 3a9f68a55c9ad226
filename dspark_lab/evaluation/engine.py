"""Prompts through a serving engine: what it wrote, verify step by verify step, and its own counters."""

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from prometheus_client.parser import text_string_to_metric_families

from dspark_lab.evaluation.decode import Progress, silent
from dspark_lab.records import Sampling, TokenizedConversation, Trace, VerifyStep

REQUEST_TIMEOUT_S = 1800.0  # interpreted kernels write a token in a second or two
_COUNTERS = "vllm:spec_decode_num_"


class Server(Protocol):
    """What is needed of ``cluster.vllm.VllmServer``."""

    model: str

    def get(self, path: str, *, timeout_s: float = ...) -> str: ...

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class DraftCounters:
    """vLLM's counters since the server started; a last step counts whole, though the answer may end inside it.

    ``accepted_at[k - 1]``: drafts whose first k tokens were accepted.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_at: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "DraftCounters":
        """From the body of ``/metrics``, summed over the engines of one server.

        Raises:
            ValueError: the server does no speculative decoding.
        """
        totals: dict[str, int] = {}
        positions: dict[int, int] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"{_COUNTERS}accepted_tokens_per_pos_total":
                    position = int(sample.labels["position"])
                    positions[position] = positions.get(position, 0) + int(sample.value)
                elif sample.name.startswith(_COUNTERS) and sample.name.endswith("_total"):
                    name = sample.name.removeprefix(_COUNTERS).removesuffix("_total")
                    totals[name] = totals.get(name, 0) + int(sample.value)
        if "drafts" not in totals:
            raise ValueError(f"/metrics has no {_COUNTERS}drafts_total: this server does no speculative decoding")
        accepted_at = tuple(positions[position] for position in sorted(positions))
        return cls(totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"], accepted_at)

    def since(self, earlier: "DraftCounters") -> "DraftCounters":
        return DraftCounters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            tuple(now - before for now, before in zip(self.accepted_at, earlier.accepted_at, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's new tokens (end token included), what each verify step drafted and accepted, seconds to the first token.

    ``accepted`` is the engine's: of the last step some may lie beyond the end of the answer.
    """

    token_ids: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    first_token_s: float

    @classmethod
    def parse(cls, reply: Mapping[str, Any]) -> "Answer":
        """From the reply of ``/v1/completions``, of a server started with ``ARGUMENTS``."""
        drafting = reply["metrics"]["speculative_decoding"]
        return cls(
            tuple(reply["choices"][0]["token_ids"]),
            tuple(drafting["per_step_drafted"] or ()),
            tuple(drafting["per_step_accepted"] or ()),
            reply["metrics"]["time_to_first_token_ms"] / 1000,
        )

    def trace(self, prompt: TokenizedConversation) -> Trace:
        """In this project's accounting: the last step is cut where the answer ends.

        Raises:
            ValueError: the verify steps do not make up the answer.
        """
        emitted = [accepted + 1 for accepted in self.accepted]
        beyond = 1 + sum(emitted) - len(self.token_ids)
        if not 0 <= beyond < max(emitted, default=1):
            raise ValueError(
                f"{prompt.id}: the engine wrote {len(self.token_ids)} tokens, but its {len(emitted)} verify steps account "
                f"for {1 + sum(emitted)}: some steps drafted nothing, or its accounting has changed"
            )
        if emitted:
            emitted[-1] -= beyond
        anchors = [len(prompt) + index for index in accumulate(emitted[:-1], initial=0)]
        steps = zip(anchors, self.drafted, emitted, strict=False)  # without steps there is one anchor too many
        return Trace(prompt.id, prompt.domain, tuple(VerifyStep(p, d, e - 1) for p, d, e in steps), len(self.token_ids))


ARGUMENTS = ("--enable-per-request-metrics", "--per-request-spec-decode-metrics", "detailed")
"""Of the server: without them replies do not tell the verify steps."""


@dataclass(frozen=True, slots=True)
class Served:
    """Answers in the order of the prompts, the counters' growth meanwhile, and the seconds it took."""

    answers: tuple[Answer, ...]
    counters: DraftCounters
    time_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(answer.token_ids) for answer in self.answers) / self.time_s


def serve_prompts(
    server: Server,
    prompts: Sequence[TokenizedConversation],
    *,
    sampling: Sampling,
    eos_token_ids: Collection[int],
    concurrency: int,
    seed: int,
    progress: Progress = silent,
) -> Served:
    """Let the engine answer ``prompts`` (fed whole, as ids), ``concurrency`` at a time.

    Raises:
        ValueError: the engine refused a request, or its counters counted other requests too.
    """
    fixed = {
        "model": server.model,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": seed,
        "stop_token_ids": sorted(eos_token_ids),
        "return_token_ids": True,
    }

    def answer(prompt: TokenizedConversation) -> Answer:
        body = {**fixed, "prompt": prompt.token_ids.tolist()}
        return Answer.parse(server.post("/v1/completions", body, timeout_s=REQUEST_TIMEOUT_S))

    before = DraftCounters.parse(server.get("/metrics"))
    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = tuple(progress(pool.map(answer, prompts), "serve"))
    time_s = time.perf_counter() - start
    counters = DraftCounters.parse(server.get("/metrics")).since(before)
    told = sum(len(found.accepted) for found in answers), sum(sum(found.accepted) for found in answers)
    if told != (counters.drafts, counters.accepted_tokens):
        raise ValueError(
            f"the engine's counters grew by {counters.drafts} drafts and {counters.accepted_tokens} accepted tokens, its "
            f"replies tell of {told[0]} and {told[1]}: does somebody else use this server?"
        )
    return Served(answers, counters, time_s)
