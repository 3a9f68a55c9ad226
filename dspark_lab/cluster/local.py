"""The services of a run on one machine: started when first needed, as children of this process, gone when it is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from dspark_lab.cluster.services import MooncakeMaster, MooncakeSegment, Role, Service, role_of
from dspark_lab.cluster.vllm import VllmServer, capture_arguments
from dspark_lab.progress import console
from dspark_lab.store.mooncake_connection import MooncakeConnection
from dspark_lab.validation import checked


class Cluster(Protocol):
    """Where a run's services are."""

    def mooncake(self) -> MooncakeConnection: ...

    def engine(self, model: Path, *, layer_ids: Sequence[int], dtype: str, max_tokens: int) -> Sequence[str]:
        """URLs of servers that capture the states entering ``layer_ids`` (the number of layers: the one before the norm).

        Without ``layer_ids`` they only answer: vLLM drafts while it captures, which costs speed and, on CPU, the right
        distribution of sampled tokens.
        """
        ...

    def check(self) -> None:
        """Raises ServiceError when a service that was started here has ended."""
        ...

    def stop_engine(self) -> None:
        """What was captured stays; a later ``engine`` starts anew."""
        ...

    def close(self) -> None: ...


class AttachedCluster:
    """Nothing is started: what is needed runs already."""

    @checked
    def __init__(self, *, mooncake: MooncakeConnection) -> None:
        self._mooncake = mooncake

    def mooncake(self) -> MooncakeConnection:
        return self._mooncake

    def engine(self, model: Path, *, layer_ids: Sequence[int], dtype: str, max_tokens: int) -> Sequence[str]:
        raise ValueError(
            f"no server of {model}: name some (engine.endpoints), or let this run start one (cluster=local)"
        )

    def check(self) -> None: ...

    def stop_engine(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeRecipe:
    """How Mooncake's processes are started. ``segment_bytes``: memory for the states; None for this Python."""

    python: str | None
    command_prefix: tuple[str, ...]
    segment_bytes: int
    lease_s: float  # one transfer may take

    @property
    def role(self) -> Role:
        return role_of(self.python, self.command_prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecipe:
    """How vLLM is started. Nulls: this Python, every accelerator. ``arguments`` are further ones of its ``api_server``."""

    python: str | None
    command_prefix: tuple[str, ...]
    arguments: tuple[str, ...]
    visible_devices: str | None  # as CUDA_VISIBLE_DEVICES
    deadline_s: float

    @property
    def role(self) -> Role:
        return role_of(self.python, self.command_prefix)


class LocalCluster:
    """``mooncake_master``, one segment and one vLLM server, which answers or captures.

    ``close`` ends them; so does the end of this process.

    Args:
        folder: Of their logs.
        mooncake: Without addresses, which are chosen here; with those of a parent that has started it already.

    Raises (each of the methods): ServiceError with the tail of the log when a service does not get ready.
    """

    @checked
    def __init__(
        self, *, folder: Path, mooncake: MooncakeConnection, storage: MooncakeRecipe, vllm: EngineRecipe
    ) -> None:
        self.folder, self.storage, self.vllm = folder, storage, vllm
        self._planned = mooncake
        self._running: MooncakeConnection | None = None
        self._server: VllmServer | None = None
        self._captures: tuple[int, ...] = ()
        self._storage: list[Service] = []

    def mooncake(self) -> MooncakeConnection:
        if self._planned.master_address is not None:
            return self._planned
        if self._running is None:
            host, role = self._planned.local_hostname, self.storage.role
            console.print(f"cluster: starting Mooncake ({self.folder})")
            master = MooncakeMaster(folder=self.folder, host=host, role=role, lease_s=self.storage.lease_s)
            self._storage.append(master)
            segment = MooncakeSegment(
                master, folder=self.folder, num_bytes=self.storage.segment_bytes, host=host,
                protocol=self._planned.protocol, rdma_devices=self._planned.rdma_devices, role=role,
            )  # fmt: skip
            self._storage.append(segment)
            self._running = replace(self._planned, master_address=master.address, admin_url=master.admin_url)
        return self._running

    def engine(self, model: Path, *, layer_ids: Sequence[int], dtype: str, max_tokens: int) -> Sequence[str]:
        if self._server is None or self._captures != tuple(layer_ids):
            self.stop_engine()  # one at a time: they would share the accelerator
            self._server = self._start(model, tuple(layer_ids), ["--dtype", dtype, "--max-model-len", str(max_tokens)])
            self._captures = tuple(layer_ids)
        return [self._server.url]

    def check(self) -> None:
        for service in (*self._storage, *([self._server] if self._server else [])):
            service.check()

    def stop_engine(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def close(self) -> None:
        self.stop_engine()
        while self._storage:
            self._storage.pop().stop()
        self._running = None

    def _start(self, model: Path, layer_ids: tuple[int, ...], arguments: Sequence[str]) -> VllmServer:
        on_cpu = not torch.cuda.is_available()
        if layer_ids:
            kind = capture_arguments(layer_ids, mooncake=self.mooncake().of_connector)
        else:
            # vLLM's CPU engine dies of a prompt in chunks whose request has a seed.
            kind = ["--no-enable-chunked-prefill"] if on_cpu else []
        seen = self.vllm.visible_devices
        doing = "captures" if layer_ids else "answers"
        console.print(f"cluster: starting the vLLM that {doing} ({self.folder / 'vllm.log'})")
        return VllmServer(
            folder=self.folder,
            model=str(model),
            # --generation-config: else the target's own sampling defaults
            arguments=[*kind, *arguments, "--generation-config", "vllm", *self.vllm.arguments],
            environment={} if seen is None else {"CUDA_VISIBLE_DEVICES": seen},
            on_cpu=on_cpu,
            role=self.vllm.role,
            deadline_s=self.vllm.deadline_s,
        )
