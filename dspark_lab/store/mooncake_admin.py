"""What a ``mooncake_master`` tells over HTTP and not through its Python client: which objects it has, how full it is."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dspark_lab.nearby import DIRECT

TIMEOUT_S = 10.0


class MasterUnreachableError(ConnectionError):
    """The ``mooncake_master`` does not answer."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of all segments together."""

    capacity_bytes: int
    free_bytes: int


def object_names(admin_url: str, *, prefix: str) -> Sequence[str]:
    """Names of the complete objects that begin with ``prefix``."""
    return [name for name in _fetch(admin_url, "get_all_keys").splitlines() if name.startswith(prefix)]


def room(admin_url: str) -> Room:
    segments = json.loads(_fetch(admin_url, "get_segments_detail"))["segments"]
    capacity = sum(segment["size_bytes"] for segment in segments)
    return Room(capacity, capacity - sum(segment["allocator_used_bytes"] for segment in segments))


def _fetch(admin_url: str, page: str) -> str:
    try:
        with DIRECT.open(f"{admin_url}/{page}", timeout=TIMEOUT_S) as response:
            return response.read().decode()
    except OSError as error:
        raise MasterUnreachableError(
            f"the mooncake_master's HTTP side {admin_url} does not answer ({error}). Is it running, and is this its "
            "-metrics_port (store.admin_url)?"
        ) from error
