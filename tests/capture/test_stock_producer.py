"""Our client takes what hs-connectors' own producer code writes; the other direction is in ``test_live_capture``."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from captured_states import CONVERSATION, MANIFEST, STATES

from dspark_lab.capture.client import CaptureClient
from dspark_lab.capture.payloads import MooncakePayloads
from dspark_lab.capture.protocol import CaptureError
from dspark_lab.cluster.services import MooncakeMaster, MooncakeSegment
from dspark_lab.store.mooncake_admin import object_names
from dspark_lab.store.mooncake_connection import MooncakeConnection

try:
    from hs_connectors import mooncake_store

    from dspark_lab.store.mooncake_client import MooncakeClient
except ImportError:
    mooncake_store: Any = None
    MooncakeClient: Any = None
try:
    import mooncake  # pyright: ignore[reportMissingImports]
except ImportError:
    mooncake = None
pytestmark = [
    pytest.mark.mooncake,
    pytest.mark.peer,
    pytest.mark.skipif(
        mooncake is None or mooncake_store is None,
        reason="mooncake or hs-connectors is not installed: make test-services",
    ),
]


class Stock:
    """The stock producer in the place of a server: it replies as hs-connectors' connector does."""

    def __init__(self, connection: MooncakeConnection) -> None:
        config = mooncake_store.MooncakeStoreConfig.from_dict(connection.of_connector)
        self.store = mooncake_store.MooncakeHiddenStatesStore(config).setup()
        self.error: str | None = None
        self.num_asked = 0

    def post(self, path: str, body: Any, *, timeout_s: float, headers: Any = None) -> Any:
        self.num_asked += 1
        tensors = {"hidden_states": STATES, "token_ids": torch.tensor(body["prompt"])}
        specification, num_bytes = mooncake_store.packed_layout(
            {name: (list(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        )
        described = {
            "handle": f"cmpl-{headers['X-Request-Id']}-0-{self.num_asked}",
            "version": mooncake_store.VERSION,
            "tensors": specification,
            "metadata": {"num_tokens": 37, "total_aligned_bytes": num_bytes, "extract_mode": "prompt_only"},
        }
        if self.error:
            self.store.put_error(described, self.error)
        else:
            self.store.put_sample(described, tensors)
        return {"kv_transfer_params": described}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stock, CaptureClient, str]]:
    folder = tmp_path_factory.mktemp("services")
    with MooncakeMaster(folder=folder) as master, MooncakeSegment(master, folder=folder, num_bytes=2**26):
        connection = MooncakeConnection(
            master_address=master.address, admin_url=master.admin_url, protocol="tcp", rdma_devices="",
            local_hostname="127.0.0.1",
        )  # fmt: skip
        stock = Stock(connection)
        payloads = MooncakePayloads(MooncakeClient(**connection.of_client), admin_url=master.admin_url)
        client = CaptureClient(
            payloads, namespace="run", generation=None,
            endpoints=stock, manifest=MANIFEST, concurrency=2, timeout_s=20.0, payload_timeout_s=20.0,
        )  # fmt: skip
        yield stock, client, master.admin_url


def test_a_sample_of_the_stock_producer(world: tuple[Stock, CaptureClient, str]) -> None:
    _, client, admin_url = world
    ((key, sample),) = client.capture([CONVERSATION])
    assert key == CONVERSATION.key and torch.equal(sample.token_ids, CONVERSATION.token_ids)
    assert torch.equal(sample.hidden_states, STATES[:, :2]) and torch.equal(sample.last_hidden_state, STATES[:, 2])
    assert object_names(admin_url, prefix="") == []


def test_its_error_marker_is_told(world: tuple[Stock, CaptureClient, str]) -> None:
    stock, client, _ = world
    stock.error = "Non-finite producer tensor"
    with pytest.raises(CaptureError, match=r"connector failed: .*Non-finite producer tensor"):
        list(client.capture([CONVERSATION]))
