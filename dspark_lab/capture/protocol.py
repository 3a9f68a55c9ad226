"""What live training asks of an engine that captures: one request, its payload, and when the payload may go."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

from dspark_lab.capture.checksum import CHECKSUM_BYTES
from dspark_lab.records import TargetSample, TokenizedConversation
from dspark_lab.store.protocol import Manifest

Described = Mapping[str, Any]
"""``kv_transfer_params`` of the engine's reply: the payload's name, its tensors' shapes, dtypes and places."""

Reason = Literal[
    "engine", "description", "producer", "no_payload", "truncated", "corrupt", "token_ids", "non_finite", "transfer"
]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""Why a sample is rejected. It was refused by the engine, is described as another one or not at all, failed in the engine's
connector, did not come, came in part, with another checksum, with other ids, with NaN or infinity, or could not be moved."""


class CaptureError(RuntimeError):
    """The engine did not deliver a sample, or delivered another one than was asked for."""

    def __init__(self, message: str, *, reason: Reason) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class EngineUnreachableError(ConnectionError):
    """No engine answers. Nothing is wrong with the sample: ask again when there is one."""


class SampleSource(Protocol):
    """An engine with the memory that its payloads lie in. ``submit`` may be called from several threads at once, the other
    methods from one."""

    manifest: Manifest
    concurrency: int  # requests at a time
    payload_timeout_s: float  # for a payload, once its request was answered

    def submit(self, conversation: TokenizedConversation) -> Described:
        """Ask for the states; returns when the engine has answered. Raises CaptureError, EngineUnreachableError."""
        ...

    def ready(self, described: Described) -> bool:
        """Whether the payload has arrived. Raises CaptureError when the engine failed to write it."""
        ...

    def get(self, conversation: TokenizedConversation, described: Described) -> TargetSample:
        """The sample of a payload that has arrived, checked. The tensors may be views of memory that is used again when
        they are gone. Raises CaptureError, NonFiniteSampleError, MooncakeError, MissingSampleError."""
        ...

    def remove(self, described: Sequence[Described]) -> None:
        """Forget these payloads; one that is not there is no error."""
        ...

    def remove_strays(self) -> int:
        """Remove payloads that arrived after they were given up; how many."""
        ...


def payload_bytes(num_tokens: int, manifest: Manifest) -> int:
    """Of one conversation in hs-connectors' wire format: states [T, L + 1, H] and int64 ids, each to a multiple of 64, and
    our checksum."""
    states = num_tokens * (len(manifest.layer_ids) + 1) * manifest.hidden_size * manifest.torch_dtype.itemsize
    return _aligned(states) + _aligned(8 * num_tokens) + CHECKSUM_BYTES


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64
