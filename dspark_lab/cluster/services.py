"""Servers that a run starts beside itself: child processes that are ready when asked for and gone when the run is.

Each has a log in the run's folder and a watcher (``watcher.py``) that ends the whole process group when the run stops, fails
or is killed, by SIGKILL too. Everything binds to the loopback interface unless a host is given.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from dspark_lab.nearby import LOOPBACK, answers, free_port
from dspark_lab.store.mooncake_admin import room

log = logging.getLogger(__name__)

GRACE_S = 10.0  # between SIGTERM and SIGKILL
STOP_S = GRACE_S + 50.0  # on a machine that is very busy
POLL_S = 0.1
TAIL_LINES = 20
NUM_TRIES = 3  # another process may take a free port before the server does


class ServiceError(RuntimeError):
    """A service did not start, or ended by itself. The message ends with the tail of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """How the processes of one role are started: which Python has its packages, behind which command.

    ``command_prefix`` is put before the command, e.g. ("docker", "run", "--net=host", "image") or ("srun", ...).
    """

    python: str = sys.executable
    command_prefix: tuple[str, ...] = ()

    def command(self, *arguments: str) -> list[str]:
        return [*self.command_prefix, self.python, *arguments]


def role_of(python: str | None, command_prefix: tuple[str, ...]) -> Role:
    """None for this Python."""
    return Role(command_prefix=command_prefix, **({"python": python} if python else {}))


class Service:
    """A running child process. ``with`` stops it at the end.

    Args:
        name: Names the log, ``<folder>/<name>.log``; each start appends to it.
        environment: Added to this process's own. Secrets belong here, never on the command line.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{name}.log"
        watcher = Path(__file__).with_name("watcher.py")
        self._command = [sys.executable, "-I", str(watcher), str(os.getpid()), str(GRACE_S), *command]
        self._environment = {**os.environ, **(environment or {})}
        self.start()

    def start(self) -> None:
        """The same command, again where it has ended. Returns at once."""
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # a SIGKILL of the run's process group must leave the watcher its work
            )

    def wait_ready(self, is_ready: Callable[[], bool], *, deadline_s: float) -> None:
        """Raises ServiceError when the process ends, or when ``is_ready`` stays False for ``deadline_s``."""
        deadline = time.monotonic() + deadline_s
        while not is_ready():
            self.check()
            if time.monotonic() > deadline:
                self.stop()
                raise ServiceError(f"{self.name} was not ready after {deadline_s:g} s. {self._tail()}")
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raises ServiceError when the process has ended."""
        status = self._process.poll()
        if status is not None:
            raise ServiceError(f"{self.name} has ended with status {status}. {self._tail()}")

    def stop(self) -> None:
        """End the process and everything it started. May be called twice."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:  # the watcher will: no reason to hide why the run stops
                log.warning("%s has not ended %g s after it was told to", self.name, STOP_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"Last lines of {self.log}:", *lines])


class MooncakeMaster(Service):
    """``mooncake_master``: it knows which object lies where; the memory is its clients'.

    Args:
        host: Interface to bind to; an address of it is what clients on other machines need.
        lease_s: How long a reader may take to transfer one object.

    Raises:
        ServiceError: it did not answer within ``deadline_s``.
    """

    def __init__(
        self,
        *,
        folder: Path,
        host: str = LOOPBACK,
        role: Role | None = None,
        lease_s: float = 60.0,
        deadline_s: float = 30.0,
    ) -> None:
        self.host = host
        for attempt in range(NUM_TRIES):
            self.port, self.admin_port = free_port(host), free_port(host)
            arguments = master_arguments(host, port=self.port, admin_port=self.admin_port, lease_s=lease_s)
            command = (role or Role()).command(*arguments)
            super().__init__("mooncake_master", command, folder=folder)
            try:
                self.wait_ready(lambda: answers(f"{self.admin_url}/health"), deadline_s=deadline_s)
                return
            except ServiceError:
                if attempt == NUM_TRIES - 1 or "in use" not in self._tail():
                    raise

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://{self.host}:{self.admin_port}"


def master_arguments(host: str, *, port: int, admin_port: int, lease_s: float) -> list[str]:
    """Of the Python that runs ``mooncake_master``."""
    return [
        "-m", "mooncake.cli", f"-rpc_address={host}", f"-rpc_port={port}", f"-metrics_host={host}",
        f"-metrics_port={admin_port}", f"-default_kv_lease_ttl={round(1000 * lease_s)}", "-logtostderr",
    ]  # fmt: skip


class MooncakeSegment(Service):
    """``mooncake_client``: ``num_bytes`` of memory that hold samples for as long as it runs."""

    def __init__(
        self,
        master: MooncakeMaster,
        *,
        folder: Path,
        num_bytes: int,
        host: str = LOOPBACK,
        protocol: str = "tcp",
        rdma_devices: str = "",
        role: Role | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        wanted = room(master.admin_url).capacity_bytes + num_bytes
        arguments = segment_arguments(
            host, port=free_port(host), master=master.address, num_bytes=num_bytes, protocol=protocol,
            rdma_devices=rdma_devices,
        )  # fmt: skip
        command = (role or Role()).command(*arguments)
        super().__init__("mooncake_segment", command, folder=folder)
        self.wait_ready(lambda: room(master.admin_url).capacity_bytes >= wanted, deadline_s=deadline_s)


def segment_arguments(
    host: str, *, port: int, master: str, num_bytes: int, protocol: str, rdma_devices: str
) -> list[str]:
    """Of the Python that runs ``mooncake_client``, whose memory holds samples."""
    return [
        "-m", "mooncake.cli_client", f"-host={host}", f"-port={port}", "-metadata_server=P2PHANDSHAKE",
        f"-master_server_address={master}", f"-global_segment_size={num_bytes}", f"-protocol={protocol}",
        f"-device_names={rdma_devices}", "-logtostderr",
    ]  # fmt: skip
