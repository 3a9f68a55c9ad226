"""A target whose answers and states vLLM servers compute; tokenizer, head and decoding are those of the one in process."""

import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from transformers import PreTrainedTokenizerBase

from dspark_lab.capture.client import CaptureClient
from dspark_lab.capture.endpoint import Endpoint, NotAdmittedError
from dspark_lab.capture.endpoints import EndpointPool
from dspark_lab.capture.payloads import FilePayloads, MooncakePayloads, Payloads
from dspark_lab.capture.probe import Probe, ProbeRecipe, choose_prompts
from dspark_lab.cluster.local import Cluster
from dspark_lab.records import (
    Conversation,
    Sampling,
    TargetSample,
    TargetSpec,
    TokenizedConversation,
    content_hash,
)
from dspark_lab.store.mooncake_client import MooncakeClient
from dspark_lab.store.protocol import Manifest
from dspark_lab.target.chat import tokenize_prompt
from dspark_lab.target.huggingface import HuggingFaceTarget
from dspark_lab.target.protocol import TargetHead
from dspark_lab.target.resolve import Resolved
from dspark_lab.target.specification import refuse_too_long
from dspark_lab.target.verifier import HuggingFaceVerifier
from dspark_lab.validation import checked

PROBE_TIMEOUT_S = 120.0  # a server that takes longer for a few short prompts is asked again later


class VllmTarget:
    """Implements ``Target``.

    Args:
        in_process: Its weights are loaded for decoding and for the probe alone.
        cluster: Of this process; None where it only wants to know the target.
        endpoints: Servers, http://host:port: those that capture are used for that, those that do not answer prompts.
            None of them, and no ``endpoints_file``: the cluster starts what is needed.
        endpoints_file: They are listed there instead; the list is followed while running (``capture.endpoints``).
        payload_folder: Through which the states come, as vLLM's files; None: through Mooncake.
        namespace: Who owns the payloads: unique to the run.
        dtype: Of the states, as the servers compute them.
        concurrency: Requests under way.
        timeout_s: For one try of a request.
        payload_timeout_s: For the payload of one that was answered. A server that dies between the two never delivers it.
        patience_s: How long a request waits for any server to be usable.
        seed: Of sampled answers, each of which depends on it and on the prompt's id.
    """

    @checked
    def __init__(
        self,
        *,
        in_process: HuggingFaceTarget,
        cluster: Any,
        namespace: str,
        endpoints: tuple[str, ...],
        endpoints_file: Path | None,
        payload_folder: Path | None,
        dtype: Literal["bfloat16", "float32"],
        concurrency: PositiveInt,
        timeout_s: float,
        payload_timeout_s: float,
        patience_s: float,
        seed: int,
        probe: ProbeRecipe,
    ) -> None:
        self.in_process = in_process
        self._cluster: Cluster | None = cluster
        self.namespace = namespace
        self.endpoints, self.endpoints_file = endpoints, endpoints_file
        self.payload_folder = payload_folder and payload_folder.expanduser().absolute()
        self.engine_dtype = dtype
        self.concurrency, self.timeout_s, self.patience_s = concurrency, timeout_s, patience_s
        self.payload_timeout_s = payload_timeout_s
        self.seed = seed
        self.probe = probe
        self._events: Counter[str] = Counter()

    @property
    def cluster(self) -> Cluster:
        assert self._cluster is not None, "who asks servers has a cluster"
        return self._cluster

    @property
    def spec(self) -> TargetSpec:
        return self.in_process.spec

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.in_process.tokenizer

    @property
    def resolved(self) -> Resolved:
        return self.in_process.resolved

    @property
    def dtype(self) -> torch.dtype:
        """Of head and decoding."""
        return self.in_process.dtype

    def take_events(self) -> Mapping[str, int]:
        """What happened to the servers since this was last asked, by kind."""
        events, self._events = self._events, Counter()
        return events

    def head(self) -> TargetHead:
        return self.in_process.head()

    def verifier(self) -> HuggingFaceVerifier:
        return self.in_process.verifier()

    def regenerate(self, prompts: Sequence[Conversation], *, sampling: Sampling) -> Iterator[Conversation]:
        """Answers in the order of completion. Returns when a server is ready, which the iterator, once begun, lets go of.

        Raises:
            ValueError: prompt and answer are longer than the target's positions.
            EndpointError: no server answered.
        """
        thinking = self.in_process.enable_thinking
        with_ids = [
            (prompt, tokenize_prompt(prompt.messages, self.tokenizer, enable_thinking=thinking)) for prompt in prompts
        ]
        for prompt, ids in with_ids:
            refuse_too_long(self.spec, prompt.id, len(ids) + sampling.max_new_tokens)

        def answer(pool: EndpointPool, prompt: Conversation, ids: list[int]) -> Conversation:
            body = completion_request(
                ids, sampling=sampling, seed=prompt_seed(self.seed, prompt.id), eos_token_ids=self.spec.eos_token_ids
            )
            reply = pool.post("/v1/completions", body, timeout_s=self.timeout_s)
            return answered(prompt, reply, sampling=sampling, eos_token_ids=self.spec.eos_token_ids)

        def answers(opened: ExitStack, pool: EndpointPool) -> Iterator[Conversation]:
            waiting = iter(with_ids)
            with opened, ThreadPoolExecutor(self.concurrency, "regenerate") as threads:
                running: set[Future[Conversation]] = set()
                try:
                    while True:
                        free = self.concurrency - len(running)
                        running |= {threads.submit(answer, pool, *pair) for pair in islice(waiting, free)}
                        if not running:
                            return
                        done, running = wait(running, return_when=FIRST_COMPLETED)
                        for future in done:
                            yield future.result()
                finally:
                    pool.close()  # whoever waits for a server would keep the threads
                    threads.shutdown(cancel_futures=True)

        with ExitStack() as opening:
            pool = opening.enter_context(self._pool(layer_ids=(), admit=self._refuse_capturing))
            pool.wait(patience_s=self.patience_s)
            return answers(opening.pop_all(), pool)

    def capture(self, conversations: Sequence[TokenizedConversation]) -> Iterator[tuple[str, TargetSample]]:
        """(key, sample) of each conversation in the order of completion, in ``engine_dtype``; views of one buffer each.

        Returns when a server is ready, which the iterator, once begun, lets go of.

        Raises:
            ValueError: a conversation longer than the target's positions.
            EndpointError: no server, or none that passes the probe.
            CaptureError: a server did not deliver what it was asked for.
        """
        for conversation in conversations:
            refuse_too_long(self.spec, conversation.id, len(conversation) + 1)  # it answers with one token
        opened = ExitStack()
        client = opened.enter_context(self.capturing(conversations))

        def samples() -> Iterator[tuple[str, TargetSample]]:
            with opened:
                yield from client.capture(conversations)

        return samples()

    @contextmanager
    def capturing(
        self,
        conversations: Sequence[TokenizedConversation],
        *,
        generation: str | None = None,
        patience_s: float | None = None,
    ) -> Iterator[CaptureClient]:
        """A client of the servers that capture; each is probed with some of ``conversations`` before it is used.

        ``generation``: of the run's other clients; None begins one. ``patience_s``: of requests, instead of the target's,
        once a first server is usable.
        """
        settings: dict[str, Any] = {
            "namespace": self.namespace,
            "generation": generation or uuid.uuid4().hex,  # the probes' payloads are no orphans
            "manifest": Manifest.for_target(self.spec, engine="vllm", dtype=self.engine_dtype),
            "concurrency": self.concurrency,
            "timeout_s": self.timeout_s,
            "payload_timeout_s": self.payload_timeout_s,
        }
        probe = Probe(self.in_process, choose_prompts(conversations, self.probe), self.probe)

        def admit(endpoint: Endpoint) -> None:
            with closing(self._payloads()) as payloads:
                brief = {**settings, "timeout_s": self._probe_timeout_s}
                probe.examine(CaptureClient(payloads, endpoints=endpoint, **brief))

        with closing(self._payloads()) as payloads:
            layer_ids = (*self.spec.layer_ids, self.spec.num_layers)
            with self._pool(layer_ids=layer_ids, admit=admit, patience_s=patience_s) as pool:
                pool.wait(patience_s=self.patience_s)
                client = CaptureClient(payloads, endpoints=pool, **settings)
                client.remove_orphans()
                yield client

    def _payloads(self) -> Payloads:
        """Belong to one thread."""
        if self.payload_folder is not None:
            return FilePayloads(self.payload_folder)
        connection = self.cluster.mooncake()
        assert connection.admin_url
        return MooncakePayloads(MooncakeClient(**connection.of_client), admin_url=connection.admin_url)

    @contextmanager
    def _pool(
        self, *, layer_ids: tuple[int, ...], admit: Any, patience_s: float | None = None
    ) -> Iterator[EndpointPool]:
        source = self.endpoints_file or self.endpoints
        if not source:
            limit = self.spec.max_position_embeddings
            source = self.cluster.engine(
                self.resolved.folder,
                layer_ids=layer_ids,
                dtype=self.engine_dtype,
                max_tokens=limit,
                payload_folder=self.payload_folder if layer_ids else None,
            )
        patience_s = self.patience_s if patience_s is None else patience_s
        with EndpointPool(source, patience_s=patience_s, admit=admit, check=self.cluster.check) as pool:
            try:
                yield pool
            finally:
                self._events.update(pool.events)

    @property
    def _probe_timeout_s(self) -> float:
        return min(self.timeout_s, PROBE_TIMEOUT_S)

    def _refuse_capturing(self, endpoint: Endpoint) -> None:
        """Raises NotAdmittedError for a server that is made to capture.

        Extraction goes through vLLM's speculative decoding: every step computes one drafted token more, and on CPU (0.32)
        sampled answers come out wrong.
        """
        body = {"prompt": [0], "max_tokens": 1, "temperature": 0}
        owner = f"{self.namespace}--admission--{uuid.uuid4().hex}"  # so that its payload is removed as an orphan
        reply = endpoint.post("/v1/completions", body, timeout_s=self._probe_timeout_s, headers={"X-Request-Id": owner})
        if reply.get("kv_transfer_params"):
            raise NotAdmittedError(
                "it captures hidden states, so it is not used to answer prompts: start one that does not"
            )


def completion_request(
    prompt: Sequence[int], *, sampling: Sampling, seed: int, eos_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Body for ``/v1/completions``. Everything is said, since a server may have defaults of its target's."""
    body = {
        "prompt": list(prompt),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": sorted(eos_token_ids),
        "return_token_ids": True,
    }
    return body if sampling.greedy else body | {"seed": seed}


def prompt_seed(seed: int, prompt_id: str) -> int:
    """Random numbers of one prompt, whatever else is asked and when."""
    return int(content_hash([seed, f"regenerate {prompt_id}"], 12), 16)


def answered(
    prompt: Conversation, reply: Mapping[str, Any], *, sampling: Sampling, eos_token_ids: Sequence[int]
) -> Conversation:
    """The prompt with the very ids that the server drew, the end token that stopped it included.

    Raises ValueError for a reply without ids, or whose ids do not end as it says.
    """
    (choice,) = reply["choices"]
    token_ids, finish = choice.get("token_ids"), choice["finish_reason"]
    if not token_ids:
        raise ValueError(f"{prompt.id}: the server returned no token_ids: it does not know return_token_ids")
    ends = [index for index, token_id in enumerate(token_ids) if token_id in eos_token_ids]
    expected = "stop" if ends == [len(token_ids) - 1] else "length"
    if finish != expected or (finish == "length" and (ends or len(token_ids) != sampling.max_new_tokens)):
        raise ValueError(
            f"{prompt.id}: the server says it stopped by {finish!r} after {len(token_ids)} tokens, the target's end tokens "
            f"{sorted(eos_token_ids)} stand at {ends} and max_new_tokens is {sampling.max_new_tokens}"
        )
    return replace(prompt, answer_token_ids=tuple(token_ids), sampling=sampling, finish=finish)
