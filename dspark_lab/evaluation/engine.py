"""Prompts through a serving engine: what it wrote, verify step by verify step, and its own counters."""

import statistics
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
    """What is needed of ``cluster.vllm.VllmApi``."""

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


ARGUMENTS = ("--enable-per-request-metrics",)
DRAFTING_ARGUMENTS = ("--per-request-spec-decode-metrics", "detailed")
"""Of the server, the second with a drafter: without them replies tell neither times nor verify steps."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's new tokens (end token included), what each verify step drafted and accepted.

    ``accepted`` is the engine's: of the last step some may lie beyond the end of the answer. ``first_token_s``: from the
    request's arrival to its first token, waiting included; ``decode_s``: from there to the last one.
    """

    token_ids: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    first_token_s: float
    decode_s: float

    @classmethod
    def parse(cls, reply: Mapping[str, Any], *, drafts: bool = True) -> "Answer":
        """From the reply of ``/v1/completions``; ``drafts``: whether the server has a drafter.

        Raises:
            ValueError: the server was started without the arguments above.
        """
        token_ids, told = tuple(reply["choices"][0]["token_ids"]), reply.get("metrics") or {}
        drafting = told.get("speculative_decoding") or {}
        accepted = tuple(drafting.get("per_step_accepted") or ())
        if not told or (drafts and len(token_ids) > 1 and not accepted):
            wanted = " ".join((*ARGUMENTS, *(DRAFTING_ARGUMENTS if drafts else ())))
            raise ValueError(f"the server's replies tell no verify steps or times: start it with {wanted}")
        waited_ms = (told.get("queue_time_ms") or 0.0) + told["time_to_first_token_ms"]
        drafted = tuple(drafting.get("per_step_drafted") or ())
        return cls(token_ids, drafted, accepted, waited_ms / 1000, told["generation_time_ms"] / 1000)

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


@dataclass(frozen=True, slots=True)
class Served:
    """Answers in the order of the prompts, the counters' growth meanwhile (None without a drafter), the seconds taken."""

    answers: tuple[Answer, ...]
    counters: DraftCounters | None
    time_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(answer.token_ids) for answer in self.answers) / self.time_s

    @property
    def tokens_per_s_per_user(self) -> float | None:
        """Tokens after each request's first / seconds that requests spent decoding; None where all answers are one token."""
        seconds = sum(answer.decode_s for answer in self.answers)
        return sum(len(answer.token_ids) - 1 for answer in self.answers) / seconds if seconds else None

    @property
    def first_token_s(self) -> float:
        """Median over the requests."""
        return statistics.median(answer.first_token_s for answer in self.answers)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens after each request's first / verify steps, 1 without a drafter.

        None where some steps drafted nothing, which the replies do not tell.
        """
        if self.counters is None:
            return 1.0
        steps = sum(len(answer.accepted) for answer in self.answers)
        untold = any(1 + sum(a.accepted) + len(a.accepted) < len(a.token_ids) for a in self.answers)
        return None if untold or not steps else sum(len(answer.token_ids) - 1 for answer in self.answers) / steps


def serve_prompts(
    server: Server,
    prompts: Sequence[TokenizedConversation],
    *,
    sampling: Sampling,
    eos_token_ids: Collection[int],
    concurrency: int,
    seed: int,
    drafts: bool = True,
    progress: Progress = silent,
) -> Served:
    """Let the engine answer ``prompts`` (fed whole, as ids), ``concurrency`` at a time; ``drafts``: it has a drafter.

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
        return Answer.parse(server.post("/v1/completions", body, timeout_s=REQUEST_TIMEOUT_S), drafts=drafts)

    before = DraftCounters.parse(server.get("/metrics")) if drafts else None
    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = tuple(progress(pool.map(answer, prompts), "serve"))
    time_s = time.perf_counter() - start
    if before is None:
        return Served(answers, None, time_s)
    counters = DraftCounters.parse(server.get("/metrics")).since(before)
    told = sum(len(found.accepted) for found in answers), sum(sum(found.accepted) for found in answers)
    if told != (counters.drafts, counters.accepted_tokens):
        raise ValueError(
            f"the engine's counters grew by {counters.drafts} drafts and {counters.accepted_tokens} accepted tokens, its "
            f"replies tell of {told[0]} and {told[1]}: does somebody else use this server?"
        )
    return Served(answers, counters, time_s)
