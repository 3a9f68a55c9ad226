"""The disk connector without an engine, in a process of its own that imports vLLM: ``connector_alone.py <folder>``."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import (  # pyright: ignore[reportMissingImports]
    example_hidden_states_connector as stock,
)

from dspark_lab.capture.disk_connector import DiskHiddenStatesConnector, require_layers


def connector_alone() -> DiskHiddenStatesConnector:
    """Its cache: blocks, layers, slots, hidden size."""
    made = DiskHiddenStatesConnector.__new__(DiskHiddenStatesConnector)
    made._kv_cache, made._block_size = torch.arange(3 * 2 * 4 * 8).view(3, 2, 4, 8).bfloat16(), 4
    made._caches = [made._kv_cache]
    made._is_tp_rank_zero = made.use_lock = True
    made._lock_fds, made._req_futures, made._req_copy_events = {}, {}, {}
    made._accumulated_finished_req_ids = set()
    made._executor = ThreadPoolExecutor(1)
    return made


def finish(connector: DiskHiddenStatesConnector, name: str, folder: Path) -> str:
    """As vLLM goes on when a request of six tokens in blocks 2 and 0 is over."""
    path, told = str(folder / f"{name}.safetensors"), stock.ExampleHiddenStatesConnectorMetadata()
    told.new_req_filenames[name] = path
    connector._connector_metadata = told
    connector.wait_for_save()
    pending: Any = stock.PendingSave(name, path, torch.arange(6), [2, 0])
    pending.all_block_ids = ([2, 0],)
    told.pending_saves.append(pending)
    done, _ = connector.get_finished({name})
    assert done == {name}, "its blocks are never free again"
    return path


def main(folder: Path) -> None:
    connector = connector_alone()
    theirs = stock.load_hidden_states(finish(connector, "cmpl-sound", folder / "payloads"))  # waits for the lock
    assert theirs["hidden_states"].shape == (6, 2, 8)
    assert connector._kv_cache is not None
    connector._kv_cache[0, 1, 0, 0] = float("nan")
    finish(connector, "cmpl-spoilt", folder / "payloads")
    assert connector._kv_cache[[0, 2]].count_nonzero() == 0 and connector._kv_cache[1].all(), (
        "its NaN would be the next's"
    )
    (folder / "file").touch()
    finish(connector, "cmpl-lost", folder / "file" / "no folder")
    connector._executor.shutdown()
    require_layers(connector._kv_cache, block_size=4, num_layers=2, hidden_size=8)
    try:
        require_layers(connector._kv_cache, block_size=4, num_layers=3, hidden_size=8)
    except ValueError as error:
        assert "holds 64 numbers, not 96" in str(error)
        return
    raise AssertionError("another number of layers was accepted")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
