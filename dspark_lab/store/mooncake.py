"""Samples in the memory of other processes, moved by Mooncake over TCP or RDMA. Layout: docs/capture_and_stores.md."""

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from dspark_lab.records import TargetSample
from dspark_lab.store import mooncake_admin
from dspark_lab.store.mooncake_client import MooncakeClient
from dspark_lab.store.mooncake_payload import HEADER_BYTES, Header, head_bytes, payload_bytes, views
from dspark_lab.store.protocol import (
    CorruptSampleError,
    HiddenStateStore,
    Manifest,
    MissingSampleError,
    NoRoomError,
)
from dspark_lab.store.sample import require_finite, require_fit
from dspark_lab.validation import checked

SAMPLE_OVERHEAD_BYTES = 512  # head and padding


class MooncakeStore(HiddenStateStore):
    """Samples below ``<namespace>/<generation>/``; published by ``put``, there until ``delete``, gone with the segments.

    Args:
        namespace: Who owns the samples: unique to a run. Its owner sees to it that only one process at a time starts one.
        generation: That of the store to join, as ``store.generation`` of the process that started it. None starts a new
            one and removes what earlier ones of the namespace left behind; they are never read.
        founds: Whether to start ``generation`` where it is not there.
        admin_url: http://host:port of the master's ``-metrics_port``; names and free memory are only told there.
        part_bytes: A sample with a larger payload is moved in several objects.

    Raises:
        MasterUnreachableError: no mooncake_master.
        ValueError: the generation's manifest differs from ``manifest``, or there is none; a forked process.
        MooncakeError: everything else (``mooncake_errors.CODES``).
    """

    @checked
    def __init__(
        self,
        *,
        manifest: Manifest,
        namespace: Annotated[str, Field(pattern=r"^[\w.-]+$")],
        generation: str | None,
        founds: bool = False,
        master_address: str,
        admin_url: str,
        protocol: Literal["tcp", "rdma"],
        rdma_devices: str,
        local_hostname: str,
        part_bytes: Annotated[int, Field(gt=0, multiple_of=64)],
    ) -> None:
        self.manifest = manifest
        self.namespace = namespace
        self.generation = generation or uuid.uuid4().hex
        self.admin_url = admin_url
        self.part_bytes = part_bytes
        self.connection = {
            "master_address": master_address,
            "protocol": protocol,
            "rdma_devices": rdma_devices,
            "local_hostname": local_hostname,
        }
        self._opened: MooncakeClient | None = None
        if generation is None or (founds and not self._client.exists(self._name("manifest"))):
            self._remove_orphans()
            self._write_manifest()
        self.read_manifest().check(manifest, place=f"generation {self.generation} of {namespace}")

    def put(self, key: str, sample: TargetSample) -> None:
        if key and self._client.exists(self._head(key)):
            return
        require_fit(key, sample, manifest=self.manifest)
        num_tokens = sample.token_ids.numel()
        num_bytes = payload_bytes(num_tokens, self.manifest)
        start = head_bytes(-(-num_bytes // self.part_bytes))
        buffer = self._client.take(start + num_bytes)
        payload = buffer[start:]
        written = views(payload, num_tokens, self.manifest)
        for name in ("hidden_states", "last_hidden_state", "token_ids", "loss_mask"):
            getattr(written, name).copy_(getattr(sample, name))
        require_finite(key, written)
        header = Header.for_payload(payload, num_tokens=num_tokens, part_bytes=self.part_bytes)
        buffer[:start] = torch.frombuffer(bytearray(header.to_bytes(key)), dtype=torch.uint8)
        try:
            self._publish(key, header, head=buffer[:start], payload=payload, whole=buffer)
        except NoRoomError as error:
            found = mooncake_admin.room(self.admin_url)
            raise NoRoomError(f"{error} {self._told(num_bytes, found)}") from error

    def get(self, key: str) -> TargetSample:
        buffer, header = self._read_head(key)
        payload = buffer[head_bytes(header.num_parts) :]
        if header.num_parts > 1:
            payload = self._read_parts(key, header)
        header.check(payload, key)
        if payload_bytes(header.num_tokens, self.manifest) != payload.numel():
            raise CorruptSampleError(
                f"sample {key!r} in Mooncake does not have the manifest's shapes: capture it again."
            )
        found = views(payload, header.num_tokens, self.manifest)
        sample = TargetSample(
            token_ids=found.token_ids.to(torch.int64),
            loss_mask=found.loss_mask.bool(),
            hidden_states=found.hidden_states,
            last_hidden_state=found.last_hidden_state,
        )
        require_finite(key, sample)
        return sample

    def delete(self, key: str) -> None:
        try:
            parts = self._parts(key, self._read_head(key)[1])
        except CorruptSampleError:
            prefix = self._name("part", "")
            names = mooncake_admin.object_names(self.admin_url, prefix=prefix)
            parts = [name for name in names if name.removeprefix(prefix).split("/", 2)[2] == key]
        # The head first: no one may find a sample some of whose parts are gone.
        self._client.remove([self._head(key)])
        self._client.remove(parts)

    def keys(self) -> Sequence[str]:
        prefix = self._head("")
        return sorted(name.removeprefix(prefix) for name in mooncake_admin.object_names(self.admin_url, prefix=prefix))

    def lengths(self) -> Mapping[str, int]:
        keys = self.keys()
        heads = self._client.get_heads([self._head(key) for key in keys], HEADER_BYTES)
        return {
            key: Header.from_bytes(head, key).num_tokens
            for key, head in zip(keys, heads, strict=True)
            if head is not None  # deleted since
        }

    def estimate_bytes(self, num_tokens: int, *, num_samples: int = 1) -> int:
        return num_tokens * self.manifest.bytes_per_token + num_samples * SAMPLE_OVERHEAD_BYTES

    def ensure_room(self, num_bytes: int) -> None:
        found = mooncake_admin.room(self.admin_url)
        if num_bytes > found.free_bytes:
            raise NoRoomError(self._told(num_bytes, found))

    def sync(self) -> None: ...

    def close(self) -> None:
        """Let go of the connection; the samples stay in the segments."""
        if self._opened and self._opened.pid == os.getpid():
            self._opened.close()
        self._opened = None

    def read_manifest(self) -> Manifest:
        """The manifest of this generation. Raises ValueError when there is none, or it is damaged."""
        place = f"generation {self.generation!r} of {self.namespace!r}"
        try:
            size = self._client.size(self._name("manifest"))
            buffer = self._client.take(size)
            self._client.get_into([self._name("manifest")], [buffer])
            return Manifest.from_json(buffer.numpy().tobytes().decode())
        except MissingSampleError:
            raise ValueError(
                f"{place} is not in Mooncake: its master or its segments were restarted, or store.generation is wrong."
            ) from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"manifest of {place}: {error} Start a new generation (store.generation=null).") from error

    def __getstate__(self) -> dict[str, Any]:
        """A spawned worker gets the settings and opens its own connection."""
        return {**self.__dict__, "_opened": None}

    @property
    def _client(self) -> MooncakeClient:
        if self._opened is None:
            self._opened = MooncakeClient(**self.connection)
        elif self._opened.pid != os.getpid():
            raise ValueError(
                "a forked process cannot use Mooncake: its threads are gone and new ones hang. Read in the trainer's own "
                "process (data.num_workers=0), or start workers with multiprocessing_context='spawn'."
            )
        return self._opened

    def _publish(self, key: str, header: Header, *, head: Tensor, payload: Tensor, whole: Tensor) -> None:
        parts = self._parts(key, header)
        if not parts:
            self._client.put([self._head(key)], [whole])
            return
        self._client.put(parts, payload.split(header.part_bytes))
        published = False
        try:
            self._client.put([self._head(key)], [head])
            # Mooncake says 0 too when another writer's head is there already, or under way.
            published = self._read_head(key)[1].writer == header.writer
        except MissingSampleError:
            pass
        finally:
            if not published:
                self._client.remove(parts)

    def _read_head(self, key: str) -> tuple[Tensor, Header]:
        try:
            buffer = self._client.take(self._client.size(self._head(key)))
            self._client.get_into([self._head(key)], [buffer])
        except MissingSampleError:
            raise MissingSampleError(
                f"sample {key!r} is not in {self.namespace}/{self.generation} in Mooncake. Capture it first."
            ) from None
        return buffer, Header.from_bytes(buffer, key)

    def _read_parts(self, key: str, header: Header) -> Tensor:
        payload = self._client.take(header.payload_bytes)
        parts = payload.split(header.part_bytes)
        try:
            sizes = self._client.get_into(self._parts(key, header), parts)
        except MissingSampleError as error:
            self._read_head(key)  # raises MissingSampleError when it is being deleted
            raise CorruptSampleError(f"sample {key!r} has lost a part: {error}") from error
        if sizes != [part.numel() for part in parts]:
            raise CorruptSampleError(f"sample {key!r} has parts of {sizes} bytes: delete it, then capture it again.")
        return payload

    def _remove_orphans(self) -> None:
        own = f"{self.namespace}/{self.generation}/"
        names = mooncake_admin.object_names(self.admin_url, prefix=f"{self.namespace}/")
        self._client.remove([name for name in names if not name.startswith(own)])

    def _write_manifest(self) -> None:
        text = self.manifest.to_json().encode()
        buffer = self._client.take(len(text))
        buffer[:] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._client.put([self._name("manifest")], [buffer])

    def _told(self, num_bytes: int, found: mooncake_admin.Room) -> str:
        return (
            f"Mooncake: {num_bytes:,} bytes needed, {found.free_bytes:,} free of {found.capacity_bytes:,} in all segments. "
            "Give the segments more memory, delete what was used, or use store=disk."
        )

    def _name(self, *parts: str) -> str:
        return "/".join((self.namespace, self.generation, *parts))

    def _head(self, key: str) -> str:
        return self._name("head", key)

    def _parts(self, key: str, header: Header) -> list[str]:
        """The names of its parts, none when the payload lies in the head."""
        numbers = range(header.num_parts if header.num_parts > 1 else 0)
        return [self._name("part", f"{header.writer:016x}", str(number), key) for number in numbers]
