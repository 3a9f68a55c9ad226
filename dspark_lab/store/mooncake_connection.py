"""How the processes of a run find Mooncake and each other, the same for store, capture client and vLLM's connector."""

from dataclasses import dataclass
from typing import Any, Literal

CONNECTOR_BUFFER_BYTES = 2**24  # it sends from registered memory of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConnection:
    """``local_hostname`` is the address under which other machines reach this one. No addresses: not started yet."""

    master_address: str | None
    admin_url: str | None
    protocol: Literal["tcp", "rdma"]
    rdma_devices: str
    local_hostname: str

    @property
    def of_client(self) -> dict[str, Any]:
        """Arguments of ``MooncakeClient``."""
        return {
            "master_address": self.master_address,
            "protocol": self.protocol,
            "rdma_devices": self.rdma_devices,
            "local_hostname": self.local_hostname,
        }

    @property
    def of_connector(self) -> dict[str, Any]:
        """Settings of vLLM's connector, as ``hs_connectors.MooncakeStoreConfig``: it contributes no memory."""
        return {
            "master_server_address": self.master_address,
            "protocol": self.protocol,
            "device_name": self.rdma_devices,
            "local_hostname": self.local_hostname,
            "global_segment_size": 0,
            "local_buffer_size": CONNECTOR_BUFFER_BYTES,
        }
