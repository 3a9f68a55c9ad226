"""Do the nodes of one step of Slurm reach each other, both ways, at the addresses that others are told?

Each listens for a moment, and all connect to all. They find each other by files in a folder that all of them see, so that
what is examined is not also what carries the examination.
"""

import json
import os
import socket
import socketserver
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

CONNECT_S, POLL_S = 3.0, 0.1
DEADLINE_S = 60.0
"""For the slowest node of a step to have started, and then for all to have tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """This process among the tasks of a step, of which each node has one; ``folder`` is this step's alone."""

    rank: int
    num_tasks: int
    folder: Path

    @classmethod
    def found(cls, root: Path, environment: Mapping[str, str] = os.environ) -> "Step | None":
        """None outside of a step of several tasks."""
        num_tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
        if num_tasks == 1:
            return None
        names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
        step = ".".join(environment.get(name, "0") for name in names)
        return cls(rank=int(environment["SLURM_PROCID"]), num_tasks=num_tasks, folder=root / f"step-{step}")

    def tell(self, kind: str, told: object) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f".{kind}-{self.rank}"
        unfinished.write_text(json.dumps(told), encoding="utf-8")
        unfinished.replace(self.folder / f"{kind}-{self.rank}.json")

    def hear(self, kind: str, *, deadline_s: float) -> dict[int, Any]:
        """What each task has told, by rank; without those that have not by the deadline."""
        paths = {rank: self.folder / f"{kind}-{rank}.json" for rank in range(self.num_tasks)}
        end = time.monotonic() + deadline_s
        while not all(path.exists() for path in paths.values()) and time.monotonic() < end:
            time.sleep(POLL_S)
        return {rank: json.loads(path.read_text(encoding="utf-8")) for rank, path in paths.items() if path.exists()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a node tells the others. ``networks``: of its other addresses too, each as 10.1.0.0/16."""

    name: str
    address: str
    networks: Sequence[str]

    def __str__(self) -> str:
        return f"{self.name} {self.address}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another node. ``reached``, ``reaches``: why it is not, or why it does not reach this one; None: it works."""

    node: Node
    reached: str | None
    reaches: str | None


def meet(step: Step, own: Node, *, deadline_s: float = DEADLINE_S) -> list[Neighbour]:
    """Every other node of the step, by rank. Returns after the last one has tried, or after the deadline."""
    with listening(own.address, step.rank) as (port, fault):
        step.tell("node", asdict(own) | {"port": port, "fault": fault})
        present = step.hear("node", deadline_s=deadline_s)
        with ThreadPoolExecutor(step.num_tasks) as pool:
            tried = dict(zip(present, pool.map(try_to_reach, present, present.values()), strict=True))
        step.tell("tried", tried)
        told = step.hear("tried", deadline_s=deadline_s)
    absent = f"did not come within {deadline_s:g} s"
    found = []
    for rank in range(step.num_tasks):
        if rank == step.rank:
            continue
        if rank not in present:
            unknown = Node(name=f"task {rank}", address="?", networks=())
            found.append(Neighbour(node=unknown, reached=absent, reaches=absent))
            continue
        node = Node(**{name: present[rank][name] for name in ("name", "address", "networks")})
        reaches = told.get(rank, {}).get(str(step.rank), absent)
        found.append(Neighbour(node=node, reached=tried[rank], reaches=reaches))
    return found


def try_to_reach(rank: int, told: Mapping[str, Any]) -> str | None:
    """None when the task ``rank`` itself answers where it says that it listens, else why not."""
    if told["fault"]:
        return f"it cannot listen there: {told['fault']}"
    try:
        with socket.create_connection((told["address"], told["port"]), timeout=CONNECT_S) as connection:
            answer = connection.recv(16).decode()
    except OSError as error:
        return str(error)
    return None if answer == str(rank) else "another machine answers there"


@contextmanager
def listening(address: str, rank: int) -> Iterator[tuple[int, str | None]]:
    """Answers every connection with the rank, at a free port: (port, None), or (0, why it cannot)."""

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(str(rank).encode())

    try:
        server = socketserver.ThreadingTCPServer((address, 0), Answer)
    except OSError as error:
        yield 0, str(error)
        return
    with server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": POLL_S}, daemon=True).start()
        yield server.server_address[1], None
        server.shutdown()
