"""Publishing shards, and sweeping away what killed writers left behind.

Order of a publication: shard written under ``staging/<writer>/``, fsync, renamed into ``shards/``, folder fsync, line
appended to ``index/<writer>.jsonl``, fsync. A writer that is killed in between leaves a file that no log names.
"""

import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError

from dspark_lab.records import TargetSample
from dspark_lab.store.durable import is_full, no_room, publish
from dspark_lab.store.index import Index, IndexLog, claim_dead
from dspark_lab.store.shard import write_shard

logger = logging.getLogger(__name__)


class Writer:
    """One writing process of the store at ``root``: its log, its staging folder, its shards' names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = f"{time.strftime('%Y%m%dT%H%M%S')}_{os.getpid()}_{uuid4().hex[:8]}"
        self.log = IndexLog(root / "index" / f"{self.name}.jsonl")
        self._staging = root / "staging" / self.name
        self._num_shards = 0

    def publish(self, samples: Mapping[str, TargetSample], *, num_bytes: int, reserve_bytes: int) -> None:
        """Publish admitted samples as one shard. Raises NoRoomError and leaves nothing behind when the disk fills."""
        name = f"{self.name}-{self._num_shards:06d}.safetensors"
        staged, final = self._staging / name, self.root / "shards" / name
        try:
            self._staging.mkdir(exist_ok=True)
            entries = write_shard(staged, samples)
            publish(staged, final)
            self.log.publish(name, entries)
        except (OSError, SafetensorError) as error:
            staged.unlink(missing_ok=True)
            final.unlink(missing_ok=True)
            if not is_full(error):
                raise
            free_bytes = shutil.disk_usage(self.root).free
            raise no_room(self.root, num_bytes, free_bytes=free_bytes, reserve_bytes=reserve_bytes) from error
        self._num_shards += 1

    def delete(self, key: str, *, index: Index) -> None:
        """Take back every copy of ``key``; a shard without other samples goes."""
        shards = index.shards_of(key)
        self.log.delete(key, shards)
        index.refresh()
        for shard in index.dead_shards.intersection(shards):
            (self.root / "shards" / shard).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)
        self.log.close()


def sweep(root: Path, *, index: Index) -> None:
    """Remove dead shards, and unpublished files of writers that are dead. Live writers and readers do not notice."""
    index.refresh()
    shards = set((root / "shards").glob("*-*.safetensors"))
    stale = {path for path in shards if path.name in index.dead_shards}
    loose = {path for path in shards - stale if path.name not in index.live_shards}
    loose |= set((root / "staging").iterdir())
    for writer in {_writer_of(path) for path in loose}:
        with claim_dead(root / "index" / f"{writer}.jsonl") as dead:
            if dead:
                index.refresh()  # it may have published and gone since
                stale |= {path for path in loose if _writer_of(path) == writer and path.name not in index.live_shards}
    for path in stale:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if stale:
        logger.info("%s: removed %d unpublished or deleted files", root, len(stale))


def _writer_of(path: Path) -> str:
    return path.name.partition("-")[0]
