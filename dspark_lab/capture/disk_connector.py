"""The KV connector that vLLM loads to write a prompt's hidden states into files: vLLM's own, also without CUDA.

It runs in vLLM's processes, whose environment needs neither Mooncake nor hs-connectors.
"""

import fcntl
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import (  # pyright: ignore[reportMissingImports]
    example_hidden_states_connector as stock,
)

from dspark_lab.capture.checksum import CRC32, crc32_of
from dspark_lab.capture.payloads import ERROR, LAYER_IDS, LOCK
from dspark_lab.store.sample import is_finite

log = logging.getLogger(__name__)


class DiskHiddenStatesConnector(stock.ExampleHiddenStatesConnector):
    """Writes ``<shared_storage_path>/<request id>.safetensors``, locked until it is whole (``payloads.FilePayloads``).

    Refuses an engine whose cache does not hold the asked number of layers, and tells which these are. A request whose states
    are not finite, or that fails otherwise, has a marker in the file's place; the engine goes on.
    """

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ValueError when the engine captures another number of layers than it was asked for."""
        super().register_kv_caches(kv_caches)
        self._caches = list(kv_caches.values())
        require_layers(
            self._kv_cache,
            block_size=self._block_size,
            num_layers=self.num_hidden_states,
            hidden_size=self._vllm_config.model_config.get_hidden_size(),
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        held, described = super().request_finished(request, block_ids)
        return held, with_layer_ids(described, self._vllm_config)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer = super().request_finished_all_groups(request, block_ids)
        pending: dict[str, Any] = self._pending_saves
        if request.request_id in pending:
            pending[request.request_id].all_block_ids = block_ids
        return answer

    def wait_for_save(self) -> None:
        try:
            super().wait_for_save()
        except OSError as error:  # a payload without its lock never gets ready
            log.error("No lock for a payload: %s", error)

    def _submit_async_write(self, pending: Any) -> None:
        try:
            if torch.accelerator.current_accelerator() is None:
                self._submit_copied(pending)
            else:
                super()._submit_async_write(pending)
        except OSError as error:
            log.error("Nothing is written for request %s: %s", pending.req_id, error)
            lock = self._lock_fds.pop(pending.req_id, None)
            if lock is not None:
                os.close(lock)
            self._mark_copied(pending.req_id)  # else its blocks are never free again

    def _submit_copied(self, pending: Any) -> None:
        """As the stock connector, where there is no stream to copy on: the forward is over, and the copy is made at once."""
        if not self._is_tp_rank_zero:
            return
        cache, size = self._kv_cache, self._block_size
        assert cache is not None
        slots = (torch.tensor(pending.block_ids)[:, None] * size + torch.arange(size)).flatten()
        states = stock.extract_from_kv_cache(cache, slots, len(pending.token_ids))  # indexing copies
        if not is_finite(states):
            clear_blocks(self._caches, pending.all_block_ids)
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(pending.filename + LOCK, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        self._mark_copied(pending.req_id)
        written = self._executor.submit(self._write_tensors, tensors, _Over(), pending.filename, lock)
        self._req_futures[pending.req_id] = written
        written.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _mark_copied(self, request: str) -> None:
        events: dict[str, Any] = self._req_copy_events
        events[request] = _Over()

    @staticmethod
    def _write_tensors(tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        """In a thread of the writer's: write, or leave a marker, then let the reader in."""
        try:
            event.synchronize()
            states = tensors["hidden_states"]
            if not is_finite(states):
                raise ValueError(f"Non-finite hidden states {list(states.shape)}")
            save_file(tensors, filename, {CRC32: crc32_of(states, tensors["token_ids"])})
        except Exception as error:
            Path(filename).unlink(missing_ok=True)
            with suppress(OSError):
                Path(filename + ERROR).write_text(str(error))
            raise
        finally:
            if lock_fd is not None:
                os.close(lock_fd)


def clear_blocks(caches: Sequence[torch.Tensor], block_ids: Iterable[Sequence[int]]) -> None:
    """Zero a request's blocks in the engine's caches, before another request has them; on the CPU alone.

    Its attention multiplies what it masks by zero: NaN in the rest of a block would be NaN in the next request's states.
    """
    if torch.accelerator.current_accelerator() is None:
        for block in chain.from_iterable(block_ids):
            for cache in caches:
                cache[block].zero_()


def require_layers(cache: torch.Tensor | None, *, block_size: int, num_layers: int, hidden_size: int) -> None:
    """Raises ValueError unless a block of the engine's cache holds this many numbers.

    ``cache``: [blocks, ...], the other dimensions in the order of the engine's layout.
    """
    assert cache is not None
    held, asked = cache[0].numel(), block_size * num_layers * hidden_size
    if held != asked:
        raise ValueError(
            f"a block of vLLM's cache {list(cache.shape)} holds {held} numbers, not {asked} (block size x layers x hidden "
            f"size = {block_size} x {num_layers} x {hidden_size}): it captures other layers than "
            "eagle_aux_hidden_state_layer_ids of --speculative-config."
        )


def with_layer_ids(described: dict[str, Any] | None, config: Any) -> dict[str, Any] | None:
    """A reply's description of its payload, and of which layers it is. ``config``: the engine's.

    Stock consumers take the keys that they know.
    """
    asked = config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
    return None if described is None else {**described, LAYER_IDS: list(asked)}


class _Over:
    """A CUDA event where every operation is over when it returns."""

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True
