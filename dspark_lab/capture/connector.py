"""The KV connector that vLLM loads (``kv_connector_module_path``) to send a prompt's hidden states through Mooncake.

hs-connectors' own, in its wire format (version 1), for engines with and without an accelerator. It runs in vLLM's processes.
"""

import ctypes
from contextlib import nullcontext
from typing import Any

import torch
from hs_connectors.mooncake_hidden_states_connector import (  # pyright: ignore[reportMissingImports]
    MooncakeHiddenStatesConnector,
)
from hs_connectors.mooncake_store import NonFiniteTensorError  # pyright: ignore[reportMissingImports]
from mooncake.store import ReplicateConfig  # pyright: ignore[reportMissingImports]

from dspark_lab.capture import checksum
from dspark_lab.capture.disk_connector import clear_blocks, require_layers, with_layer_ids


class HiddenStatesConnector(MooncakeHiddenStatesConnector):
    """Refuses an engine whose cache does not hold the asked number of layers, and tells which these are.

    A request whose states are not finite, or that fails otherwise, has an error marker in the payload's place. Payloads have
    a checksum behind them (``capture.checksum``).
    """

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ValueError when the engine captures another number of layers than it was asked for."""
        if torch.accelerator.current_accelerator() is None:
            self._device_module = _NoStreams
        self._caches = list(kv_caches.values())
        super().register_kv_caches(kv_caches)
        require_layers(
            self._kv_cache,
            block_size=self._block_size,
            num_layers=self._num_hidden_states,
            hidden_size=self._hidden_size,
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        delayed, described = super().request_finished(request, block_ids)
        assert described is not None
        checksum.leave_room(described)  # in the writer's order too: it is the same dict
        return delayed, with_layer_ids(described, self._vllm_config)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer = super().request_finished_all_groups(request, block_ids)
        pending: dict[str, Any] = self._pending_saves
        pending[request.request_id].all_block_ids = block_ids
        return answer

    def _write_sample(self, pending: Any, ready_event: Any) -> None:
        try:
            super()._write_sample(pending, ready_event)
        except NonFiniteTensorError:
            clear_blocks(self._caches, pending.all_block_ids)
            raise

    def _ensure_store(self) -> None:
        first = not self._store_ready
        super()._ensure_store()
        if first:
            self._store._store = _Pinning(self._store._store)


class _Pinning:
    """Mooncake's client, but what it puts is sealed, and not evicted: a payload is the reader's to delete."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin = True

    def put_from(self, name: str, pointer: int, num_bytes: int) -> int:
        checksum.seal(memoryview((ctypes.c_ubyte * num_bytes).from_address(pointer)).cast("B"))
        return self._client.put_from(name, pointer, num_bytes, self._pinned)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class _NoStreams:
    """What ``torch.cuda`` offers, where every operation is over when it returns."""

    class Stream:
        def wait_event(self, event: Any) -> None: ...

    class Event:
        def record(self) -> None: ...

    @staticmethod
    def stream(stream: Any) -> Any:
        return nullcontext()
