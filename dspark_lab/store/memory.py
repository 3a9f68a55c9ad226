"""A store in the memory of this process: for tests, for smoke runs and for captures that are used once."""

from collections.abc import Mapping, Sequence

from dspark_lab.records import TargetSample
from dspark_lab.store.protocol import HiddenStateStore, Manifest, MissingSampleError, NoRoomError
from dspark_lab.store.sample import admitted, require_finite
from dspark_lab.validation import checked


class MemoryStore(HiddenStateStore):
    """At most ``limit_bytes`` of samples. Forked workers see what was put before they were forked."""

    @checked
    def __init__(self, *, manifest: Manifest, limit_bytes: int = 8 * 2**30) -> None:
        self.manifest = manifest
        self.limit_bytes = limit_bytes
        self._samples: dict[str, TargetSample] = {}
        self._used_bytes = 0

    def put(self, key: str, sample: TargetSample) -> None:
        if key in self._samples:
            return
        copied = admitted(key, sample, manifest=self.manifest)
        self.ensure_room(copied.num_bytes)
        self._samples[key] = copied
        self._used_bytes += copied.num_bytes

    def get(self, key: str) -> TargetSample:
        sample = self._find(key)
        require_finite(key, sample)
        return sample

    def delete(self, key: str) -> None:
        self._used_bytes -= self._find(key).num_bytes
        del self._samples[key]

    def keys(self) -> Sequence[str]:
        return sorted(self._samples)

    def lengths(self) -> Mapping[str, int]:
        return {key: self._samples[key].token_ids.numel() for key in sorted(self._samples)}

    def estimate_bytes(self, num_tokens: int, *, num_samples: int = 1) -> int:
        return num_tokens * (self.manifest.bytes_per_token + 4)  # ids are int64 here, int32 on disk

    def ensure_room(self, num_bytes: int) -> None:
        free_bytes = self.limit_bytes - self._used_bytes
        if num_bytes > free_bytes:
            raise NoRoomError(
                f"memory store: {num_bytes:,} bytes needed, {free_bytes:,} free of limit_bytes={self.limit_bytes:,}. "
                "Raise store.limit_bytes, capture fewer tokens, or use store=disk."
            )

    def sync(self) -> None: ...

    def close(self) -> None: ...

    def _find(self, key: str) -> TargetSample:
        if key not in self._samples:
            raise MissingSampleError(f"sample {key!r} is not in the memory store. Capture it first.")
        return self._samples[key]
