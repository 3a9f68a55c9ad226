"""Which samples are published: the union of append-only logs, one for each writer.

A log is JSON lines: ``{"shard": name, "samples": [[key, num_tokens, crc32], ...]}`` publishes a shard,
``{"deleted": key, "shards": [name, ...]}`` takes the key's copies in those shards back. As a deletion names the copies
it means, the logs can be read in any order: readers need no clock and writers no agreement.
"""

import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dspark_lab.store.durable import sync_path
from dspark_lab.store.shard import Entry


class Index:
    """Reads the logs in ``folder``; ``refresh`` reads on where it stopped. Knows no more than what was there then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._offsets: dict[str, int] = {}
        self._entries: dict[str, dict[str, Entry]] = {}  # key -> shard -> entry; two writers may publish the same key
        self._deleted: set[tuple[str, str]] = set()
        self._num_live: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def find(self, key: str) -> Entry | None:
        return next(iter(self._entries.get(key, {}).values()), None)

    def shards_of(self, key: str) -> list[str]:
        return list(self._entries.get(key, ()))

    def lengths(self) -> dict[str, int]:
        return {key: next(iter(copies.values())).num_tokens for key, copies in self._entries.items()}

    @property
    def live_shards(self) -> set[str]:
        """Shards with at least one sample that is not deleted."""
        return {shard for shard, number in self._num_live.items() if number}

    @property
    def dead_shards(self) -> set[str]:
        """Published shards all of whose samples are deleted; they never come back to life."""
        return {shard for shard, number in self._num_live.items() if not number}

    def refresh(self) -> None:
        """Raises ValueError that names a damaged log. A last line without its end is a write in progress or torn."""
        for log in sorted(self.folder.glob("*.jsonl")):
            offset = self._offsets.get(log.name, 0)
            if log.stat().st_size > offset:
                self._read(log, offset)

    def _read(self, log: Path, offset: int) -> None:
        with log.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    self._apply(json.loads(line))
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise ValueError(
                        f"{log} is damaged at byte {offset} ({error}). Remove this file: the samples that it lists are "
                        "then captured again."
                    ) from error
                offset += len(line)
                self._offsets[log.name] = offset

    def _apply(self, record: Mapping) -> None:
        if "deleted" in record:
            for shard in record["shards"]:
                self._remove(record["deleted"], shard)
            return
        entries = {
            str(key): Entry(str(record["shard"]), int(tokens), int(crc)) for key, tokens, crc in record["samples"]
        }
        self._num_live.setdefault(str(record["shard"]), 0)
        for key, entry in entries.items():
            if (key, entry.shard) not in self._deleted:
                self._entries.setdefault(key, {})[entry.shard] = entry
                self._num_live[entry.shard] += 1

    def _remove(self, key: str, shard: str) -> None:
        self._deleted.add((key, shard))
        copies = self._entries.get(key, {})
        if copies.pop(shard, None):
            self._num_live[shard] -= 1
        if not copies:
            self._entries.pop(key, None)


class IndexLog:
    """The one log that a writer appends to. It is locked as long as the writer lives: the kernel tells its death."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # waits at most for a sweeper that looks at the empty file
        sync_path(path.parent)

    def publish(self, shard: str, entries: Mapping[str, Entry]) -> None:
        samples = [[key, entry.num_tokens, entry.crc32] for key, entry in entries.items()]
        self._append({"shard": shard, "samples": samples})

    def delete(self, key: str, shards: Collection[str]) -> None:
        self._append({"deleted": key, "shards": list(shards)})

    def close(self) -> None:
        self._file.close()

    def _append(self, record: Mapping) -> None:
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        descriptor = self._file.fileno()
        start = os.fstat(descriptor).st_size
        try:
            while line:
                line = line[os.write(descriptor, line) :]
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, start)  # else the next line would continue a torn one
            raise


@contextmanager
def claim_dead(log: Path) -> Iterator[bool]:
    """Whether the writer of ``log`` is dead; no one else claims it during the block. Cuts off its torn last line."""
    if not log.exists():  # a writer makes its log before anything else
        yield True
        return
    with log.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        content = file.read()
        if not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
        yield True
