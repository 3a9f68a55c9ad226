"""Files that are whole or absent after a crash, and disks that are not filled to the brim."""

import errno
import os
import shutil
from pathlib import Path

from dspark_lab.store.protocol import NoRoomError


def sync_path(path: Path) -> None:
    """fsync of a file's content, or of a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(staged: Path, final: Path) -> None:
    """Give a finished file its final name: readers see all of it or nothing, also after a power cut."""
    sync_path(staged)
    staged.rename(final)
    sync_path(final.parent)


def require_room(folder: Path, num_bytes: int, *, reserve_bytes: int) -> None:
    """Raises NoRoomError unless ``num_bytes`` fit into the file system of ``folder`` and leave the reserve."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes - reserve_bytes < num_bytes:
        raise no_room(folder, num_bytes, free_bytes=free_bytes, reserve_bytes=reserve_bytes)


def no_room(folder: Path, num_bytes: int, *, free_bytes: int, reserve_bytes: int) -> NoRoomError:
    return NoRoomError(
        f"{folder}: {num_bytes:,} bytes needed, {free_bytes:,} free, of which store.reserve_bytes={reserve_bytes:,} "
        "stay free. Free some space, capture fewer tokens, or put the store on a larger disk ("
        "DSPARK_LAB_HOME). What was published before stays readable, and the same command goes on from there."
    )


def is_full(error: Exception) -> bool:
    """Whether a write failed because the disk or the quota is full; safetensors tells it in its message only."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in codes or any(f"(os error {code})" in str(error) for code in codes)
