"""Asks a vLLM server for the hidden states of token ids and takes them from where it puts them, checked."""

import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count, islice
from typing import Any, Protocol

import torch

from dspark_lab.capture.endpoint import EndpointError, NoServerError
from dspark_lab.capture.payloads import Payloads, require_layer_ids, require_wanted
from dspark_lab.capture.protocol import CaptureError, Described, EngineUnreachableError, SampleSource
from dspark_lab.records import TargetSample, TokenizedConversation
from dspark_lab.store.protocol import Manifest
from dspark_lab.store.sample import require_finite

LONGEST_POLL_S = 0.05
RETRIED = {"no_payload", "truncated", "corrupt"}  # once: the server may have died, or a bit have been flipped


class Poster(Protocol):
    """One server, or a pool of them (``capture.endpoints``)."""

    def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Any: ...


class CaptureClient(SampleSource):
    """Hidden states of one server or of several that serve the same target.

    They capture ``manifest.layer_ids`` and, last, the state before the final norm (``cluster.vllm.capture_arguments``).

    Payloads are named ``cmpl-<namespace>--<generation>--<client>x<number>...``, and stay until they are removed; the next
    generation of the namespace removes what a killed one has left (``remove_orphans``).

    Args:
        payloads: Where the servers put them.
        namespace: Who owns the payloads: unique to a run, of letters, digits, ``-`` and ``_``.
        generation: That of the run's other clients; None starts a new one.
        endpoints: Who is asked.
        concurrency: Requests under way; so many payloads wait at most.
        timeout_s: For one request.
        payload_timeout_s: For its payload, once it was answered.
    """

    def __init__(
        self,
        payloads: Payloads,
        *,
        namespace: str,
        generation: str | None,
        endpoints: Poster,
        manifest: Manifest,
        concurrency: int,
        timeout_s: float,
        payload_timeout_s: float,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", namespace):
            raise ValueError(
                f"namespace={namespace!r}: use letters, digits, - and _ alone, as vLLM's request ids allow."
            )
        self.namespace = namespace
        self.generation = generation or uuid.uuid4().hex
        self.payloads = payloads
        self.endpoints = endpoints
        self.manifest = manifest
        self.concurrency = concurrency
        self.timeout_s, self.payload_timeout_s = timeout_s, payload_timeout_s
        self._client = uuid.uuid4().hex[:8]
        self._numbers = count()
        self._wanted: set[int] = set()  # requests whose payload is still to be read and removed

    def capture(self, conversations: Sequence[TokenizedConversation]) -> Iterator[tuple[str, TargetSample]]:
        """(key, sample) of each conversation in the order of completion; the payload is deleted once it is read.

        A payload that did not come, or not whole, as its server died, or changed under way, is asked for once more.

        Raises CaptureError, EngineUnreachableError, NonFiniteSampleError, MasterUnreachableError.
        """
        waiting, lost = iter(conversations), set[str]()
        with ThreadPoolExecutor(self.concurrency, "capture") as pool:
            running: dict[Future[Described], TokenizedConversation] = {}
            try:
                while True:
                    for conversation in islice(waiting, self.concurrency - len(running)):
                        running[pool.submit(self.submit, conversation)] = conversation
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        conversation = running.pop(future)
                        try:
                            sample = self.take(conversation, future.result())
                        except CaptureError as error:
                            if error.reason not in RETRIED or conversation.key in lost:
                                raise
                            lost.add(conversation.key)
                            running[pool.submit(self.submit, conversation)] = conversation
                            continue
                        yield conversation.key, sample
            finally:
                pool.shutdown(cancel_futures=True)

    def remove_orphans(self) -> int:
        """Delete what earlier generations of this namespace left; how many objects."""
        names = self.payloads.names(f"cmpl-{self.namespace}--")
        orphans = [name for name in names if not name.startswith(f"cmpl-{self.namespace}--{self.generation}--")]
        self.payloads.remove(orphans)
        return len(orphans)

    def remove_strays(self) -> int:
        """Delete payloads of requests that were given up, or answered by two servers; how many objects."""
        names = self.payloads.names(f"cmpl-{self._owner}x")
        strays = [name for name in names if self._number(name) not in self._wanted]
        self.payloads.remove(strays)
        return len(strays)

    def submit(self, conversation: TokenizedConversation) -> Described:
        return self.ask(conversation)["kv_transfer_params"]

    def ask(self, conversation: TokenizedConversation, **further: Any) -> Mapping[str, Any]:
        """A server's reply to ``further`` fields of the request too; its ``kv_transfer_params`` describe the payload.

        Raises CaptureError, EngineUnreachableError.
        """
        number = next(self._numbers)
        self._wanted.add(number)
        try:
            reply = self._post(conversation, owner=f"{self._owner}x{number}", **further)
            self.payloads.check(conversation, reply["kv_transfer_params"], self.manifest)
            require_layer_ids(conversation, reply["kv_transfer_params"], self.manifest)
        except Exception:
            self._wanted.discard(number)
            raise
        return reply

    def take(self, conversation: TokenizedConversation, described: Described) -> TargetSample:
        """Wait for the payload, at most ``payload_timeout_s``, and take it out."""
        deadline, pause = time.monotonic() + self.payload_timeout_s, 0.001
        try:
            while not self.ready(described):
                if time.monotonic() > deadline:
                    raise CaptureError(
                        f"{self.payloads.name(described)}: no payload after {self.payload_timeout_s:g} s. The engine's log "
                        "tells why.",
                        reason="no_payload",
                    )
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_S)
            return self.get(conversation, described)
        finally:
            self.remove([described])

    def ready(self, described: Described) -> bool:
        return self.payloads.ready(described)

    def get(self, conversation: TokenizedConversation, described: Described) -> TargetSample:
        """The sample of a payload that has arrived, as views of it; the payload stays where it is."""
        captured = self.payloads.read(described)
        require_wanted(conversation, self.manifest, captured.states.shape, str(captured.states.dtype))
        if not torch.equal(captured.token_ids, conversation.token_ids):
            raise CaptureError(
                f"{self.payloads.name(described)}: the engine captured other token ids than were sent to it.",
                reason="token_ids",
            )
        sample = TargetSample(
            token_ids=conversation.token_ids,
            loss_mask=conversation.loss_mask,
            hidden_states=captured.states[:, :-1],
            last_hidden_state=captured.states[:, -1],
        )
        require_finite(conversation.key, sample)
        return sample

    def remove(self, described: Sequence[Described]) -> None:
        names = [self.payloads.name(one) for one in described]
        self._wanted.difference_update(map(self._number, names))
        self.payloads.remove(names)

    @property
    def _owner(self) -> str:
        return f"{self.namespace}--{self.generation}--{self._client}"

    def _number(self, name: str) -> int | None:
        """Of this client's request that the object ``name`` answers."""
        found = re.match(rf"cmpl-{self._owner}x(\d+)\b", name)
        return int(found[1]) if found else None

    def _post(self, conversation: TokenizedConversation, *, owner: str, **further: Any) -> Mapping[str, Any]:
        body = {"prompt": conversation.token_ids.tolist(), "max_tokens": 1, "temperature": 0, **further}
        try:
            reply = self.endpoints.post(
                "/v1/completions", body, timeout_s=self.timeout_s, headers={"X-Request-Id": owner}
            )
        except NoServerError as error:
            raise EngineUnreachableError(f"{conversation.id}: {error}") from error
        except EndpointError as error:
            raise CaptureError(f"{conversation.id}: {error}", reason="engine") from error
        if not reply.get("kv_transfer_params"):
            raise CaptureError(
                f"{conversation.id}: the engine's reply has no kv_transfer_params: it runs without the connector "
                "(cluster.vllm.capture_arguments).",
                reason="engine",
            )
        return reply
