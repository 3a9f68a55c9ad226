from collections.abc import Callable

import pytest

from dspark_lab.records import TargetSample
from dspark_lab.store.memory import MemoryStore
from dspark_lab.store.protocol import Manifest, NonFiniteSampleError, NoRoomError


def test_limit(manifest: Manifest, make_sample: Callable[..., TargetSample]) -> None:
    sample = make_sample(0, num_tokens=10)
    store = MemoryStore(manifest=manifest, limit_bytes=2 * sample.num_bytes)
    store.put("a", sample)
    store.put("b", sample)
    with pytest.raises(
        NoRoomError, match=f"{sample.num_bytes} bytes needed, 0 free of limit_bytes=.*store.limit_bytes"
    ):
        store.put("c", sample)
    store.delete("a")
    store.put("c", sample)
    assert store.keys() == ["b", "c"]


def test_states_spoilt_in_memory_are_refused(manifest: Manifest, make_sample: Callable[..., TargetSample]) -> None:
    store = MemoryStore(manifest=manifest)
    store.put("key", make_sample(3))
    store.get("key").hidden_states[0] = float("nan")
    with pytest.raises(NonFiniteSampleError, match="'key'"):
        store.get("key")
