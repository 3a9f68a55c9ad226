"""What a hidden-state store promises, whatever holds the bytes; and the manifest that says what its states are."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import KW_ONLY, asdict, dataclass, fields
from types import TracebackType
from typing import Protocol, Self

import torch

from dspark_lab.records import TargetSample, TargetSpec, content_hash

SCHEMA_VERSION = 1
# float16 is left out on purpose: the massive activations of many targets overflow it.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TOKEN_BYTES = 5  # on disk: id int32 + mask uint8


class MissingSampleError(KeyError):
    """No sample is published under the key."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the message's repr


class CorruptSampleError(ValueError):
    """The bytes stored under the key are not those that were put. ``delete`` it, then capture it again."""


class NonFiniteSampleError(ValueError):
    """States of the sample contain NaN or infinity."""


class NoRoomError(ValueError):
    """The store cannot take the bytes. Unlike the other errors this one is not about a sample: stop capturing."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the states of a store are: captured from which target, where in it, and in which form.

    ``layer_convention`` "entering": ``hidden_states[:, l]`` enters decoder layer ``layer_ids[l]``, and the last hidden
    state is taken before the final norm (see ``TargetSample``). ``dtype`` is that of the stored states.

    Raises ValueError for a dtype, convention or schema version that this code does not know.
    """

    target: str
    _: KW_ONLY
    revision: str
    fingerprint: str
    template_hash: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    engine: str
    dtype: str = "bfloat16"
    layer_convention: str = "entering"
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version={self.schema_version}: this code reads version {SCHEMA_VERSION}. "
                "Capture again, or use the dspark_lab that wrote the store."
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: states are stored as one of {sorted(DTYPES)}.")
        if self.layer_convention != "entering":
            raise ValueError(f"layer_convention={self.layer_convention!r}: translate the layer ids to 'entering'.")
        if not self.layer_ids or self.hidden_size < 1:
            raise ValueError(f"layer_ids={self.layer_ids}, hidden_size={self.hidden_size}: both must be given.")

    @classmethod
    def for_target(cls, spec: TargetSpec, *, engine: str, dtype: str = "bfloat16") -> "Manifest":
        """The manifest of states that ``engine`` captures from the target ``spec``."""
        return cls(
            spec.name,
            revision=spec.revision,
            fingerprint=spec.fingerprint,
            template_hash=spec.template_hash,
            layer_ids=tuple(spec.layer_ids),
            hidden_size=spec.hidden_size,
            engine=engine,
            dtype=dtype,
        )

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Raises ValueError that names unknown and missing fields."""
        values = json.loads(text)
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != known:
            odd = sorted(known.symmetric_difference(values)) if isinstance(values, dict) else values
            raise ValueError(f"not a manifest of schema version {SCHEMA_VERSION}: unknown or missing fields {odd}.")
        values["layer_ids"] = tuple(values["layer_ids"])
        return cls(values.pop("target"), **values)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @property
    def content_hash(self) -> str:
        """Names the folder of the store below the cache root: another capture never meets these states."""
        return content_hash(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token at rest: L + 1 states, id and mask."""
        return (len(self.layer_ids) + 1) * self.hidden_size * self.torch_dtype.itemsize + TOKEN_BYTES

    def check(self, wanted: "Manifest", *, place: str = "the store") -> None:
        """Raises ValueError that lists every field in which these states differ from the ``wanted`` ones."""
        differences = [
            f"{field.name}: stored {mine!r}, wanted {theirs!r}"
            for field in fields(self)
            for mine, theirs in [(getattr(self, field.name), getattr(wanted, field.name))]
            if mine != theirs
        ]
        if differences:
            raise ValueError(
                f"{place} holds states of another capture ({'; '.join(differences)}). Run with the settings that it "
                "was captured with, or set DSPARK_LAB_HOME to another folder (the store's own carries the manifest's hash)."
            )


class HiddenStateStore(Protocol):
    """Samples by content-addressed key. Every implementation passes ``tests/store/test_contract.py``.

    * ``get`` returns what was put, bit for bit, in the manifest's dtype, on the CPU, or raises; never something else.
      The tensors may be views of the store's own memory: do not write into them.
    * A published sample survives the death of its writer; what is not published yet is lost with it.
    * One store object belongs to one thread. Forked and spawned workers may use their copy of it.
    """

    manifest: Manifest

    def put(self, key: str, sample: TargetSample) -> None:
        """Take a copy. A key that is already there is skipped: equal keys mean equal content.

        Raises NonFiniteSampleError; NoRoomError; ValueError for shapes that do not fit the manifest.
        """
        ...

    def get(self, key: str) -> TargetSample:
        """Raises MissingSampleError (a KeyError), CorruptSampleError or NonFiniteSampleError."""
        ...

    def delete(self, key: str) -> None:
        """Forget the sample, so that it can be put again. Raises MissingSampleError."""
        ...

    def keys(self) -> Sequence[str]:
        """Keys of all samples that ``get`` would find, sorted."""
        ...

    def lengths(self) -> Mapping[str, int]:
        """Tokens of every sample by key, in the order of ``keys``, without reading any state."""
        ...

    def estimate_bytes(self, num_tokens: int, *, num_samples: int = 1) -> int:
        """Bytes that ``num_samples`` samples of ``num_tokens`` tokens altogether will take, rather too many."""
        ...

    def ensure_room(self, num_bytes: int) -> None:
        """Raises NoRoomError (place, bytes needed and free, mend) unless ``num_bytes`` more fit."""
        ...

    def sync(self) -> None:
        """Publish everything put so far: afterwards it is visible to other processes and survives this one."""
        ...

    def close(self) -> None:
        """``sync`` and let go of files. May be called twice; the next call of another method opens them again."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What was captured before an error is worth keeping, unless the error is that it cannot be kept.
        with suppress(NoRoomError) if isinstance(error, NoRoomError) else nullcontext():
            self.close()
