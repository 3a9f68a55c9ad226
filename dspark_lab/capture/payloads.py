"""Where servers put what they have captured, and how it is taken from there: Mooncake, or files in a folder of both."""

import fcntl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark_lab.capture import checksum
from dspark_lab.capture.protocol import CaptureError, Described
from dspark_lab.records import TokenizedConversation
from dspark_lab.store.mooncake_admin import object_names
from dspark_lab.store.mooncake_client import MooncakeClient
from dspark_lab.store.protocol import Manifest

WIRE_VERSION = 1  # of hs-connectors
LAYER_IDS = "layer_ids"
"""Beside the wire format's keys, told by our connectors: which layers the states enter, their number for the last state."""
FILE, LOCK, ERROR = ".safetensors", ".lock", ".error"  # the latter two behind the first


@dataclass(frozen=True, slots=True)
class Captured:
    """``states`` [T, L, H] of the layers asked for, ``token_ids`` int64 [T]."""

    states: Tensor
    token_ids: Tensor


class Payloads(Protocol):
    """What ``CaptureClient`` asks of it. A payload is named after its request: ``cmpl-<X-Request-Id>...``."""

    def check(self, conversation: TokenizedConversation, described: Described, manifest: Manifest) -> None:
        """Raises CaptureError unless the payload, as the server describes it, is that of the conversation."""
        ...

    def name(self, described: Described) -> str: ...

    def ready(self, described: Described) -> bool:
        """Whether it has arrived: the reply may come before it. Raises CaptureError with what a failed producer said."""
        ...

    def read(self, described: Described) -> Captured:
        """One that has arrived, and stays. Raises CaptureError when bytes are missing or others than its producer sealed."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Forget payloads and what failed producers said; one that is not there is no error."""
        ...

    def names(self, prefix: str) -> Sequence[str]:
        """Those that begin so."""
        ...

    def close(self) -> None: ...


class MooncakePayloads(Payloads):
    """Packed objects of hs-connectors' wire format, version 1; read into registered memory without a copy.

    ``admin_url``: http://host:port of the master's ``-metrics_port``; names are only told there.
    """

    def __init__(self, mooncake: MooncakeClient, *, admin_url: str) -> None:
        self.mooncake, self.admin_url = mooncake, admin_url

    def check(self, conversation: TokenizedConversation, described: Described, manifest: Manifest) -> None:
        if described.get("version") != WIRE_VERSION:
            raise CaptureError(
                f"the engine's payloads have version {described.get('version')}, this code reads {WIRE_VERSION}.",
                reason="description",
            )
        try:
            states, ids = described["tensors"]["hidden_states"], described["tensors"]["token_ids"]
            end = max(map(_end, (states, ids)))
            sound = isinstance(described["handle"], str) and list(ids["shape"]) == [len(conversation)]
            sound = sound and end <= described["metadata"]["total_aligned_bytes"] and ids["dtype"] == "torch.int64"
            sound = sound and end <= described.get(checksum.OFFSET, end)
            found = (list(states["shape"]), states["dtype"])
        except (KeyError, TypeError) as error:
            raise CaptureError(
                f"{conversation.id}: the engine's description of its payload is not of the wire format: {error!r}.",
                reason="description",
            ) from error
        require_wanted(conversation, manifest, *found, told=f"described as {dict(described)}", sound=sound)

    def name(self, described: Described) -> str:
        return described["handle"]

    def ready(self, described: Described) -> bool:
        name = described["handle"]
        if self.mooncake.exists(name):
            return True
        marker = _marker(name)
        if not self.mooncake.exists(marker):
            return False
        told = self.mooncake.take(self.mooncake.size(marker))
        self.mooncake.get_into([marker], [told])
        raise failed_producer(name, told.numpy().tobytes().decode(errors="replace"))

    def read(self, described: Described) -> Captured:
        name = described["handle"]
        wanted_bytes = described["metadata"]["total_aligned_bytes"]
        payload = self.mooncake.take(self.mooncake.size(name))
        (received,) = self.mooncake.get_into([name], [payload])
        if received != wanted_bytes:
            raise CaptureError(
                f"{name}: {received:,} bytes arrived of {wanted_bytes:,}: request it again.", reason="truncated"
            )
        if checksum.OFFSET in described and not checksum.is_sound(payload.numpy().data):
            raise _corrupt(name)
        tensors = described["tensors"]
        return Captured(_tensor(payload, tensors["hidden_states"]), _tensor(payload, tensors["token_ids"]))

    def remove(self, names: Sequence[str]) -> None:
        self.mooncake.remove([*names, *map(_marker, names)])

    def names(self, prefix: str) -> Sequence[str]:
        return object_names(self.admin_url, prefix=prefix)

    def close(self) -> None:
        self.mooncake.close()


class FilePayloads(Payloads):
    """Files in the format of vLLM's ``ExampleHiddenStatesConnector``: ``<folder>/<request>.safetensors``.

    The writer holds a lock on ``<file>.lock`` until the file is whole, or until it has ended; ours
    (``capture.disk_connector``) leaves ``<file>.error`` in the place of one that failed.

    ``folder``: the server's ``shared_storage_path``, under whatever name it is seen from here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def check(self, conversation: TokenizedConversation, described: Described, manifest: Manifest) -> None:
        path = described.get("hidden_states_path")
        if not isinstance(path, str) or not path.endswith(FILE):
            raise CaptureError(
                f"{conversation.id}: the engine's reply names no file with the states ({dict(described)}): start it with "
                "dspark_lab.capture.disk_connector, or leave engine.payload_folder out.",
                reason="description",
            )

    def name(self, described: Described) -> str:
        return self._path(described).name.removesuffix(FILE)

    def ready(self, described: Described) -> bool:
        path = self._path(described)
        try:
            with _beside(path, LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return False
        if path.exists():
            return True
        try:
            told = _beside(path, ERROR).read_text()
        except FileNotFoundError:
            raise CaptureError(
                f"{path}: the engine has ended, or failed, without writing it. Its log tells why.", reason="no_payload"
            ) from None
        raise failed_producer(str(path), told)

    def read(self, described: Described) -> Captured:
        path = self._path(described)
        try:
            with safe_open(path, "pt") as file:
                captured = Captured(file.get_tensor("hidden_states"), file.get_tensor("token_ids"))
                told = (file.metadata() or {}).get(checksum.CRC32)
        except (SafetensorError, OSError) as error:
            raise CaptureError(
                f"{path}: not a whole payload ({error!r}): request it again.", reason="truncated"
            ) from error
        if told is not None and told != checksum.crc32_of(captured.states, captured.token_ids):
            raise _corrupt(str(path))
        return captured

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            path = self.folder / f"{name}{FILE}"
            for each in (path, _beside(path, ERROR), _beside(path, LOCK)):
                each.unlink(missing_ok=True)

    def names(self, prefix: str) -> Sequence[str]:
        found = (path.name for path in self.folder.iterdir() if FILE in path.name)
        return sorted({name.partition(FILE)[0] for name in found if name.startswith(prefix)})

    def close(self) -> None: ...

    def _path(self, described: Described) -> Path:
        return self.folder / Path(described["hidden_states_path"]).name


def require_wanted(
    conversation: TokenizedConversation,
    manifest: Manifest,
    shape: Sequence[int],
    dtype: str,
    *,
    told: str = "",
    sound: bool = True,
) -> None:
    """Raises CaptureError unless shape and dtype are those of the conversation's states, and all else is ``sound``."""
    found = [list(shape), dtype]
    wanted = [
        [len(conversation), len(manifest.layer_ids) + 1, manifest.hidden_size],
        str(manifest.torch_dtype),
    ]
    if found != wanted or not sound:
        raise CaptureError(
            f"{conversation.id}: the engine captured {found}, wanted were {wanted} "
            f"([tokens, layers + 1, hidden size], dtype{told and '; '}{told}): start it with this run's layer ids and "
            "--dtype.",
            reason="description",
        )


def require_layer_ids(conversation: TokenizedConversation, described: Described, manifest: Manifest) -> None:
    """Raises CaptureError when the server tells that it captures other layers. Stock connectors do not tell."""
    told = described.get(LAYER_IDS)
    if told is not None and told[:-1] != list(manifest.layer_ids):
        raise CaptureError(
            f"{conversation.id}: the engine captured the states entering layers {told}, wanted were "
            f"{list(manifest.layer_ids)} and the last: start it with this run's layer ids.",
            reason="description",
        )


def failed_producer(name: str, words: str) -> CaptureError:
    reason = "non_finite" if "Non-finite" in words else "producer"
    return CaptureError(f"{name}: the engine's connector failed: {words}", reason=reason)


def _corrupt(name: str) -> CaptureError:
    return CaptureError(
        f"{name}: bytes were changed under way, its checksum differs: request it again.", reason="corrupt"
    )


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


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
