"""Asks a vLLM server for the hidden states of token ids and takes them out of Mooncake, checked and without a copy."""

import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark_lab.capture.endpoints import EndpointError
from dspark_lab.records import TargetSample, TokenizedConversation
from dspark_lab.store.mooncake_admin import object_names
from dspark_lab.store.mooncake_client import MooncakeClient
from dspark_lab.store.protocol import Manifest
from dspark_lab.store.sample import require_finite

WIRE_VERSION = 1  # of hs-connectors
LONGEST_POLL_S = 0.05


class CaptureError(RuntimeError):
    """The engine did not deliver a sample, or delivered another one than was asked for."""


class Poster(Protocol):
    """One server, or a pool of them (``capture.endpoints``)."""

    def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Any: ...


class CaptureClient:
    """Hidden states of one server or of several that serve the same target.

    They capture ``manifest.layer_ids`` and, last, the state before the final norm (``cluster.vllm.capture_arguments``).

    Payloads are named ``cmpl-<namespace>--<generation>--...``, and pinned until they are read; the next generation of the
    namespace removes what a killed one has left (``remove_orphans``).

    Args:
        namespace: Who owns the payloads: unique to a run, of letters, digits, ``-`` and ``_``.
        generation: That of the run's other clients; None starts a new one.
        endpoints: Who is asked.
        concurrency: Requests under way; so many payloads wait in Mooncake at most.
        timeout_s: For one request, and for its payload after that.
    """

    def __init__(
        self,
        mooncake: MooncakeClient,
        *,
        namespace: str,
        generation: str | None,
        endpoints: Poster,
        manifest: Manifest,
        concurrency: int,
        timeout_s: float,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", namespace):
            raise ValueError(
                f"namespace={namespace!r}: use letters, digits, - and _ alone, as vLLM's request ids allow."
            )
        self.namespace = namespace
        self.generation = generation or uuid.uuid4().hex
        self.mooncake = mooncake
        self.endpoints = endpoints
        self.manifest = manifest
        self.concurrency = concurrency
        self.timeout_s = timeout_s

    def capture(self, conversations: Sequence[TokenizedConversation]) -> Iterator[tuple[str, TargetSample]]:
        """(key, sample) of each conversation in the order of completion; the payload is deleted once it is read.

        Raises CaptureError, NonFiniteSampleError, MasterUnreachableError.
        """
        waiting = iter(conversations)
        with ThreadPoolExecutor(self.concurrency, "capture") as pool:
            running: dict[Future[Mapping[str, Any]], TokenizedConversation] = {}
            try:
                while True:
                    for conversation in islice(waiting, self.concurrency - len(running)):
                        running[pool.submit(self._request, conversation)] = conversation
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        conversation = running.pop(future)
                        yield conversation.key, self.take(conversation, future.result())
            finally:
                pool.shutdown(cancel_futures=True)

    def remove_orphans(self, admin_url: str) -> int:
        """Delete what earlier generations of this namespace left in Mooncake; how many objects."""
        names = object_names(admin_url, prefix=f"cmpl-{self.namespace}--")
        orphans = [name for name in names if not name.startswith(f"cmpl-{self.namespace}--{self.generation}--")]
        self.mooncake.remove(orphans)
        return len(orphans)

    def take(self, conversation: TokenizedConversation, described: Mapping[str, Any]) -> TargetSample:
        """The sample that the reply's ``kv_transfer_params`` describe, taken out of Mooncake."""
        name = str(described["handle"])
        self._check_description(conversation, described)
        self._wait_for(name)
        payload = self.mooncake.take(self.mooncake.size(name))
        (received,) = self.mooncake.get_into([name], [payload])
        self.mooncake.remove([name])
        wanted_bytes = described["metadata"]["total_aligned_bytes"]
        if received != wanted_bytes:
            raise CaptureError(f"{name}: {received:,} bytes arrived of {wanted_bytes:,}: request it again.")
        states = _tensor(payload, described["tensors"]["hidden_states"])
        if not torch.equal(_tensor(payload, described["tensors"]["token_ids"]), conversation.token_ids):
            raise CaptureError(f"{name}: the engine captured other token ids than were sent to it.")
        sample = TargetSample(
            token_ids=conversation.token_ids,
            loss_mask=conversation.loss_mask,
            hidden_states=states[:, :-1],
            last_hidden_state=states[:, -1],
        )
        require_finite(conversation.key, sample)
        return sample

    def ask(self, conversation: TokenizedConversation, **further: Any) -> Mapping[str, Any]:
        """A server's reply to ``further`` fields of the request too; its ``kv_transfer_params`` describe the payload."""
        body = {"prompt": conversation.token_ids.tolist(), "max_tokens": 1, "temperature": 0, **further}
        owner = f"{self.namespace}--{self.generation}--{uuid.uuid4().hex}"
        try:
            reply = self.endpoints.post(
                "/v1/completions", body, timeout_s=self.timeout_s, headers={"X-Request-Id": owner}
            )
        except EndpointError as error:
            raise CaptureError(f"{conversation.id}: {error}") from error
        if not reply.get("kv_transfer_params"):
            raise CaptureError(
                f"{conversation.id}: the engine's reply has no kv_transfer_params: it runs without the connector "
                "(cluster.vllm.capture_arguments)."
            )
        return reply

    def _request(self, conversation: TokenizedConversation) -> Mapping[str, Any]:
        return self.ask(conversation)["kv_transfer_params"]

    def _check_description(self, conversation: TokenizedConversation, described: Mapping[str, Any]) -> None:
        if described.get("version") != WIRE_VERSION:
            raise CaptureError(
                f"the engine's payloads have version {described.get('version')}, this code reads {WIRE_VERSION}."
            )
        states = described["tensors"]["hidden_states"]
        wanted = [len(conversation), len(self.manifest.layer_ids) + 1, self.manifest.hidden_size]
        found = [list(states["shape"]), states["dtype"]]
        if found != [wanted, str(self.manifest.torch_dtype)]:
            raise CaptureError(
                f"{conversation.id}: the engine captured {found}, wanted were {[wanted, str(self.manifest.torch_dtype)]} "
                "([tokens, layers + 1, hidden size], dtype): start it with this run's layer ids and --dtype."
            )

    def _wait_for(self, name: str) -> None:
        """The reply may come before the payload; a failed producer leaves a marker instead."""
        deadline, pause = time.monotonic() + self.timeout_s, 0.001
        marker = f"{name}:error"
        while not self.mooncake.exists(name):
            if self.mooncake.exists(marker):
                told = self.mooncake.take(self.mooncake.size(marker))
                self.mooncake.get_into([marker], [told])
                self.mooncake.remove([marker])
                raise CaptureError(
                    f"{name}: the engine's connector failed: {told.numpy().tobytes().decode(errors='replace')}"
                )
            if time.monotonic() > deadline:
                raise CaptureError(f"{name}: no payload after {self.timeout_s:g} s. The engine's log tells why.")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_S)


def _tensor(payload: Tensor, described: Mapping[str, Any]) -> Tensor:
    start, dtype = described["offset"], getattr(torch, described["dtype"].removeprefix("torch."))
    return payload[start : start + described["nbytes"]].view(dtype).view(described["shape"])
