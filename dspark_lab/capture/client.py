"""Asks a vLLM server for the hidden states of token ids and takes them out of Mooncake, checked and without a copy."""

import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count, islice
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark_lab.capture.endpoints import EndpointError, NoServerError
from dspark_lab.capture.protocol import CaptureError, Described, EngineUnreachableError, SampleSource
from dspark_lab.records import TargetSample, TokenizedConversation
from dspark_lab.store.mooncake_admin import object_names
from dspark_lab.store.mooncake_client import MooncakeClient
from dspark_lab.store.protocol import Manifest
from dspark_lab.store.sample import require_finite

WIRE_VERSION = 1  # of hs-connectors
LONGEST_POLL_S = 0.05


class Poster(Protocol):
    """One server, or a pool of them (``capture.endpoints``)."""

    def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Any: ...


class CaptureClient(SampleSource):
    """Hidden states of one server or of several that serve the same target.

    They capture ``manifest.layer_ids`` and, last, the state before the final norm (``cluster.vllm.capture_arguments``).

    Payloads are named ``cmpl-<namespace>--<generation>--<client>x<number>...``, and pinned until they are removed; the next
    generation of the namespace removes what a killed one has left (``remove_orphans``).

    Args:
        admin_url: http://host:port of the master's ``-metrics_port``; names are only told there.
        namespace: Who owns the payloads: unique to a run, of letters, digits, ``-`` and ``_``.
        generation: That of the run's other clients; None starts a new one.
        endpoints: Who is asked.
        concurrency: Requests under way; so many payloads wait in Mooncake at most.
        timeout_s: For one request.
        payload_timeout_s: For its payload, once it was answered.
    """

    def __init__(
        self,
        mooncake: MooncakeClient,
        *,
        admin_url: str,
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
        self.mooncake = mooncake
        self.endpoints = endpoints
        self.admin_url = admin_url
        self.manifest = manifest
        self.concurrency = concurrency
        self.timeout_s, self.payload_timeout_s = timeout_s, payload_timeout_s
        self._client = uuid.uuid4().hex[:8]
        self._numbers = count()
        self._wanted: set[int] = set()  # requests whose payload is still to be read and removed

    def capture(self, conversations: Sequence[TokenizedConversation]) -> Iterator[tuple[str, TargetSample]]:
        """(key, sample) of each conversation in the order of completion; the payload is deleted once it is read.

        Raises CaptureError, EngineUnreachableError, NonFiniteSampleError, MasterUnreachableError.
        """
        waiting = iter(conversations)
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
                        yield conversation.key, self.take(conversation, future.result())
            finally:
                pool.shutdown(cancel_futures=True)

    def remove_orphans(self) -> int:
        """Delete what earlier generations of this namespace left in Mooncake; how many objects."""
        names = object_names(self.admin_url, prefix=f"cmpl-{self.namespace}--")
        orphans = [name for name in names if not name.startswith(f"cmpl-{self.namespace}--{self.generation}--")]
        self.mooncake.remove(orphans)
        return len(orphans)

    def remove_strays(self) -> int:
        """Delete payloads of requests that were given up, or answered by two servers; how many objects."""
        names = object_names(self.admin_url, prefix=f"cmpl-{self.namespace}--{self.generation}--{self._client}x")
        strays = [name for name in names if self._number(name) not in self._wanted]
        self.mooncake.remove(strays)
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
            self._check_description(conversation, reply["kv_transfer_params"])
        except Exception:
            self._wanted.discard(number)
            raise
        return reply

    def take(self, conversation: TokenizedConversation, described: Described) -> TargetSample:
        """Wait for the payload, at most ``payload_timeout_s``, and take it out of Mooncake."""
        deadline, pause = time.monotonic() + self.payload_timeout_s, 0.001
        try:
            while not self.ready(described):
                if time.monotonic() > deadline:
                    raise CaptureError(
                        f"{described['handle']}: no payload after {self.payload_timeout_s:g} s. The engine's log tells why.",
                        reason="no_payload",
                    )
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_S)
            return self.get(conversation, described)
        finally:
            self.remove([described])

    def ready(self, described: Described) -> bool:
        """Whether the payload has arrived: the reply may come before it. A failed producer leaves a marker instead.

        Raises CaptureError that tells what the producer said.
        """
        name = described["handle"]
        if self.mooncake.exists(name):
            return True
        marker = _marker(name)
        if not self.mooncake.exists(marker):
            return False
        told = self.mooncake.take(self.mooncake.size(marker))
        self.mooncake.get_into([marker], [told])
        words = told.numpy().tobytes().decode(errors="replace")
        reason = "non_finite" if "Non-finite" in words else "producer"
        raise CaptureError(f"{name}: the engine's connector failed: {words}", reason=reason)

    def get(self, conversation: TokenizedConversation, described: Described) -> TargetSample:
        """The sample of a payload that has arrived, as views of registered memory; the payload stays in Mooncake."""
        name = described["handle"]
        wanted_bytes = described["metadata"]["total_aligned_bytes"]
        payload = self.mooncake.take(self.mooncake.size(name))
        (received,) = self.mooncake.get_into([name], [payload])
        if received != wanted_bytes:
            raise CaptureError(
                f"{name}: {received:,} bytes arrived of {wanted_bytes:,}: request it again.", reason="truncated"
            )
        states = _tensor(payload, described["tensors"]["hidden_states"])
        if not torch.equal(_tensor(payload, described["tensors"]["token_ids"]), conversation.token_ids):
            raise CaptureError(f"{name}: the engine captured other token ids than were sent to it.", reason="token_ids")
        sample = TargetSample(
            token_ids=conversation.token_ids,
            loss_mask=conversation.loss_mask,
            hidden_states=states[:, :-1],
            last_hidden_state=states[:, -1],
        )
        require_finite(conversation.key, sample)
        return sample

    def remove(self, described: Sequence[Described]) -> None:
        """Forget payloads and markers; one that is not there is no error."""
        names = [str(one["handle"]) for one in described]
        self._wanted.difference_update(map(self._number, names))
        self.mooncake.remove([*names, *map(_marker, names)])

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

    def _check_description(self, conversation: TokenizedConversation, described: Described) -> None:
        """That the payload, as described, is that of the conversation: form, shapes, dtypes, places."""
        if described.get("version") != WIRE_VERSION:
            raise CaptureError(
                f"the engine's payloads have version {described.get('version')}, this code reads {WIRE_VERSION}.",
                reason="description",
            )
        num_tokens, dtype = len(conversation), str(self.manifest.torch_dtype)
        shape = [num_tokens, len(self.manifest.layer_ids) + 1, self.manifest.hidden_size]
        try:
            states, ids = described["tensors"]["hidden_states"], described["tensors"]["token_ids"]
            found = [list(states["shape"]), states["dtype"]]
            end = max(map(_end, (states, ids)))
            sound = isinstance(described["handle"], str) and list(ids["shape"]) == [num_tokens]
            sound = sound and end <= described["metadata"]["total_aligned_bytes"] and ids["dtype"] == "torch.int64"
        except (KeyError, TypeError) as error:
            raise CaptureError(
                f"{conversation.id}: the engine's description of its payload is not of the wire format: {error!r}.",
                reason="description",
            ) from error
        if found != [shape, dtype] or not sound:
            raise CaptureError(
                f"{conversation.id}: the engine captured {found}, wanted were {[shape, dtype]} "
                f"([tokens, layers + 1, hidden size], dtype; described as {dict(described)}): start it with this run's "
                "layer ids and --dtype.",
                reason="description",
            )


def _marker(name: str) -> str:
    """What a producer that fails writes in the payload's place."""
    return f"{name}:error"


def _end(tensor: Mapping[str, Any]) -> int:
    """Where it ends in the payload. Raises TypeError unless its bytes are those of shape and dtype, and aligned."""
    dtype = getattr(torch, tensor["dtype"].removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or tensor["nbytes"] != prod(tensor["shape"]) * dtype.itemsize:
        raise TypeError(f"{tensor['nbytes']} bytes for {tensor['shape']} of {tensor['dtype']}")
    if tensor["offset"] < 0 or tensor["offset"] % dtype.itemsize:
        raise TypeError(f"offset {tensor['offset']}")
    return tensor["offset"] + tensor["nbytes"]


def _tensor(payload: Tensor, described: Mapping[str, Any]) -> Tensor:
    start, dtype = described["offset"], getattr(torch, described["dtype"].removeprefix("torch."))
    return payload[start : start + described["nbytes"]].view(dtype).view(described["shape"])
