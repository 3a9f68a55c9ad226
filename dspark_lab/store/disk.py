"""A store on disk: safetensors shards, published atomically and read lazily. Layout: docs/capture_and_stores.md."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dspark_lab.records import TargetSample
from dspark_lab.store.durable import publish, require_room
from dspark_lab.store.index import Index
from dspark_lab.store.protocol import CorruptSampleError, HiddenStateStore, Manifest, MissingSampleError
from dspark_lab.store.sample import admitted
from dspark_lab.store.shard import Entry, OpenShards
from dspark_lab.store.writer import Writer, sweep
from dspark_lab.validation import checked

SAMPLE_OVERHEAD_BYTES = 1024  # four entries of the shard's header and one of the index take about 650


class DiskStore(HiddenStateStore):
    """Samples at ``root``, for any number of reading and writing processes of one file system with flock.

    Samples are buffered and published as a shard when ``shard_bytes`` are together, at ``sync`` and at ``close``: a
    killed writer loses at most one buffer. ``reserve_bytes`` of the disk stay free. Mode "read" needs a store.

    Raises ValueError when the manifest at ``root`` differs from ``manifest``, or when there is none to read.
    """

    @checked
    def __init__(
        self,
        root: Path,
        *,
        manifest: Manifest,
        mode: Literal["read", "write"] = "write",
        shard_bytes: int = 64 * 2**20,
        reserve_bytes: int = 2**30,
    ) -> None:
        self.root = root.expanduser()
        self.manifest = manifest
        self.mode = mode
        self.shard_bytes = shard_bytes
        self.reserve_bytes = reserve_bytes
        if mode == "write":
            for name in ("shards", "index", "staging"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            if not (self.root / "manifest.json").exists():
                _write_manifest(self.root, manifest)
        read_manifest(self.root).check(manifest, place=str(self.root))
        self._index = Index(self.root / "index")
        self._start()
        if mode == "write":
            sweep(self.root, index=self._index)

    def put(self, key: str, sample: TargetSample) -> None:
        self._require_writable("put")
        if key in self._buffer or key in self._index:
            return
        self._buffer[key] = admitted(key, sample, manifest=self.manifest)
        self._buffered_bytes += self.estimate_bytes(sample.token_ids.numel())
        if self._buffered_bytes >= self.shard_bytes:
            self.sync()

    def get(self, key: str) -> TargetSample:
        self._notice_fork()
        if key in self._buffer:
            return self._buffer[key]
        entry = self._index.find(key) or self._find_anew(key)
        try:
            return self._shards.read(key, entry)
        except CorruptSampleError:
            # Another process may have deleted this copy, or replaced it by a good one.
            newer = self._find_anew(key)
            if newer == entry:
                raise
            return self._shards.read(key, newer)

    def delete(self, key: str) -> None:
        self._require_writable("delete")
        if key in self._buffer:
            sample = self._buffer.pop(key)
            self._buffered_bytes -= self.estimate_bytes(sample.token_ids.numel())
            return
        self._find_anew(key)
        self._open_writer().delete(key, index=self._index)
        self.refresh()

    def keys(self) -> Sequence[str]:
        return list(self.lengths())

    def lengths(self) -> Mapping[str, int]:
        self.refresh()
        lengths = self._index.lengths()
        lengths |= {key: sample.token_ids.numel() for key, sample in self._buffer.items()}
        return dict(sorted(lengths.items()))

    def estimate_bytes(self, num_tokens: int, *, num_samples: int = 1) -> int:
        return num_tokens * self.manifest.bytes_per_token + num_samples * SAMPLE_OVERHEAD_BYTES

    def ensure_room(self, num_bytes: int) -> None:
        require_room(self.root, num_bytes, reserve_bytes=self.reserve_bytes)

    def refresh(self) -> None:
        """See what other processes published or deleted; ``keys``, ``lengths`` and a missing ``get`` do so anyway."""
        self._notice_fork()
        self._index.refresh()
        self._shards.retain(self._index.live_shards)

    def sync(self) -> None:
        self._notice_fork()
        if not self._buffer:
            return
        self.ensure_room(self._buffered_bytes)
        self._open_writer().publish(self._buffer, num_bytes=self._buffered_bytes, reserve_bytes=self.reserve_bytes)
        self._buffer, self._buffered_bytes = {}, 0
        self._index.refresh()

    def close(self) -> None:
        try:
            self.sync()
        finally:
            if self._writer:
                self._writer.close()
            self._start()

    def __getstate__(self) -> dict[str, Any]:
        """A spawned worker gets the settings and opens its own files; unpublished samples stay with their process."""
        private = ("_index", "_shards", "_buffer", "_buffered_bytes", "_writer", "_pid")
        return {name: value for name, value in self.__dict__.items() if name not in private}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._index = Index(self.root / "index")
        self._start()

    def _start(self) -> None:
        self._shards = OpenShards(self.root / "shards", manifest=self.manifest)
        self._buffer: dict[str, TargetSample] = {}
        self._buffered_bytes = 0
        self._writer: Writer | None = None
        self._pid = os.getpid()

    def _notice_fork(self) -> None:
        # A forked worker inherits the parent's buffer and log; both are the parent's to publish and to append to.
        if self._pid != os.getpid():
            if self._writer:
                self._writer.log.close()
            self._start()

    def _require_writable(self, action: str) -> None:
        self._notice_fork()
        if self.mode == "read":
            raise ValueError(f"{self.root} was opened with mode='read': cannot {action}. Open it with mode='write'.")

    def _find_anew(self, key: str) -> Entry:
        self.refresh()
        entry = self._index.find(key)
        if entry is None:
            raise MissingSampleError(
                f"sample {key!r} is not in {self.root}. Capture it first; what another process has put is visible "
                "once that process has called sync()."
            )
        return entry

    def _open_writer(self) -> Writer:
        if self._writer is None:
            self._writer = Writer(self.root)
        return self._writer


def read_manifest(root: Path) -> Manifest:
    """The manifest of the store at ``root``. Raises ValueError when there is none or it is damaged."""
    path = root / "manifest.json"
    try:
        return Manifest.from_json(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{root} is not a store: it has no manifest.json. Capture into it first.") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error} Restore this file, or remove {root} and capture again.") from error


def _write_manifest(root: Path, manifest: Manifest) -> None:
    staged = root / f"manifest.{os.getpid()}.partial"
    staged.write_text(manifest.to_json())
    publish(staged, root / "manifest.json")
