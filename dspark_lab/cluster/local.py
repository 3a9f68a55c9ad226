"""The services of a run on one machine: started when first needed, as children of this process, gone when it is."""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol

import torch
from pydantic import Field

from dspark_lab.cluster.services import MooncakeMaster, MooncakeSegment, Role, Service, ServiceError, role_of
from dspark_lab.cluster.vllm import VllmServer, answer_arguments, capture_arguments, through_files, through_mooncake
from dspark_lab.progress import console
from dspark_lab.store.mooncake_connection import MooncakeConnection
from dspark_lab.target.precision import has_bfloat16
from dspark_lab.validation import checked


class Cluster(Protocol):
    """Where a run's services are. ``training_environment``: of the ranks that train while the engine runs."""

    @property
    def training_environment(self) -> Mapping[str, str]: ...

    def mooncake(self) -> MooncakeConnection: ...

    def engine(
        self, model: Path, *, layer_ids: Sequence[int], dtype: str, max_tokens: int, payload_folder: Path | None
    ) -> Sequence[str]:
        """URLs of servers that capture the states entering ``layer_ids`` (the number of layers: the one before the norm)
        into ``payload_folder``, or Mooncake.

        Without ``layer_ids`` they only answer: vLLM drafts while it captures, which costs speed and, on CPU, the right
        distribution of sampled tokens.
        """
        ...

    def check(self) -> None:
        """Raises ServiceError when a service that was started here has ended, and is not started again."""
        ...

    def stop_engine(self) -> None:
        """What was captured stays; a later ``engine`` starts anew."""
        ...

    def close(self) -> None: ...


class AttachedCluster:
    """Nothing is started: what is needed runs already."""

    training_environment: Mapping[str, str] = {}

    @checked
    def __init__(self, *, mooncake: MooncakeConnection) -> None:
        self._mooncake = mooncake

    def mooncake(self) -> MooncakeConnection:
        return self._mooncake

    def engine(
        self, model: Path, *, layer_ids: Sequence[int], dtype: str, max_tokens: int, payload_folder: Path | None
    ) -> Sequence[str]:
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
    """How vLLM is started. ``python``: None for this one. ``arguments``: further ones of its ``api_server``.

    ``visible_devices``: as CUDA_VISIBLE_DEVICES; None for those that training leaves. ``num_restarts``: of a server that
    ends by itself, in the life of the run.
    """

    python: str | None
    command_prefix: tuple[str, ...]
    arguments: tuple[str, ...]
    visible_devices: str | None
    num_restarts: Annotated[int, Field(ge=0)]
    deadline_s: float

    @property
    def role(self) -> Role:
        return role_of(self.python, self.command_prefix)


class LocalCluster:
    """``mooncake_master``, one segment and one vLLM server, which answers or captures.

    A server that ends by itself is started again at its URL. ``close`` ends all; so does the end of this process.

    Args:
        folder: Of their logs.
        mooncake: Without addresses, which are chosen here; with those of a parent that has started it already.
        num_training_devices: Accelerators, the first ones, on which training runs while the engine does.

    Raises (each of the methods): ServiceError with the tail of the log when a service does not get ready.
    """

    @checked
    def __init__(
        self,
        *,
        folder: Path,
        num_training_devices: int,
        mooncake: MooncakeConnection,
        storage: MooncakeRecipe,
        vllm: EngineRecipe,
    ) -> None:
        self.folder, self.storage, self.vllm = folder, storage, vllm
        self.num_training_devices = num_training_devices
        self._planned = mooncake
        self._running: MooncakeConnection | None = None
        self._server: VllmServer | None = None
        self._serves: tuple[tuple[int, ...], Path | None] = ((), None)
        self._storage: list[Service] = []
        self._num_restarts = 0
        self._guard = threading.Lock()  # of the server: whoever waits for it checks it

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

    def engine(
        self, model: Path, *, layer_ids: Sequence[int], dtype: str, max_tokens: int, payload_folder: Path | None
    ) -> Sequence[str]:
        wanted = tuple(layer_ids), payload_folder
        if self._server is None or self._serves != wanted:
            self.stop_engine()  # one at a time: they would share the accelerator
            self._server = self._start(model, *wanted, dtype=dtype, max_tokens=max_tokens)
            self._serves = wanted
        return [self._server.url]

    def check(self) -> None:
        for service in self._storage:
            service.check()
        with self._guard:
            if self._server is not None:
                self._keep_alive(self._server)

    def stop_engine(self) -> None:
        with self._guard:
            if self._server is not None:
                self._server.stop()
                self._server = None

    def close(self) -> None:
        self.stop_engine()
        while self._storage:
            self._storage.pop().stop()
        self._running = None

    def _keep_alive(self, server: VllmServer) -> None:
        try:
            server.check()
        except ServiceError as error:
            if self._num_restarts == self.vllm.num_restarts:
                raise
            self._num_restarts += 1
            console.print(
                f"cluster: {error}\ncluster: starting it again, {self._num_restarts} of {self.vllm.num_restarts} times "
                "(cluster.vllm.num_restarts)",
                markup=False,
            )
            server.start()

    def _start(
        self,
        model: Path,
        layer_ids: tuple[int, ...],
        payload_folder: Path | None,
        *,
        dtype: str,
        max_tokens: int,
    ) -> VllmServer:
        on_cpu = not torch.cuda.is_available()
        if layer_ids:
            files = payload_folder and through_files(payload_folder)
            kind = capture_arguments(layer_ids, transfer=files or through_mooncake(self.mooncake().of_connector))
        else:
            kind = answer_arguments(on_cpu=on_cpu)
        doing = "captures" if layer_ids else "answers"
        console.print(f"cluster: starting the vLLM that {doing} ({self.folder / 'vllm.log'})")
        if dtype == "bfloat16" and on_cpu and not has_bfloat16(torch.device("cpu")):
            console.print(
                "cluster: this CPU has no bf16 units: unless the target is tiny, capture.dtype=float32 is many times faster"
            )
        return VllmServer(
            folder=self.folder,
            model=str(model),
            arguments=[
                *kind,
                *("--dtype", dtype, "--max-model-len", str(max_tokens)),
                *("--generation-config", "vllm"),  # else the target's own sampling defaults
                *self.vllm.arguments,
            ],
            environment=self._engine_devices(),
            on_cpu=on_cpu,
            role=self.vllm.role,
            deadline_s=self.vllm.deadline_s,
        )

    @property
    def training_environment(self) -> Mapping[str, str]:
        """Of the ranks."""
        return visible(seen_devices()[: self.num_training_devices])

    def _engine_devices(self) -> dict[str, str]:
        if self.vllm.visible_devices is not None:
            return {"CUDA_VISIBLE_DEVICES": self.vllm.visible_devices}
        return visible(devices_left(seen_devices(), num_training=self.num_training_devices))


def seen_devices() -> Sequence[str]:
    """Names of the accelerators of this process, as CUDA_VISIBLE_DEVICES has them; none on a machine without."""
    count, told = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if count and told is not None:
        return [name.strip() for name in told.split(",")][:count]
    return [str(index) for index in range(count)]


def devices_left(devices: Sequence[str], *, num_training: int) -> Sequence[str]:
    """Those of an engine that runs beside training, which takes the first ones. Raises ValueError when none is left."""
    left = devices[num_training:]
    if devices and not left:
        raise ValueError(
            f"training takes {num_training} accelerators (trainer.devices) of {', '.join(devices)}, so none is left for the "
            "engine that captures meanwhile: lower trainer.devices, or let both share one, e.g. "
            f"cluster.vllm.visible_devices='{devices[0]}' with --gpu-memory-utilization in cluster.vllm.arguments"
        )
    return left


def visible(devices: Sequence[str]) -> dict[str, str]:
    """Environment of a process that sees these alone; without any, what this one sees."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
