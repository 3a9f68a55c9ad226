"""Which node of one set does what, and how many nodes serve a target: from bytes alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from dspark_lab.hardware.accelerator import Accelerator
from dspark_lab.hardware.served import Capacity, ServedTarget, capacity, fewest_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """``num_gpus`` on ``num_nodes`` hold the target, with ``room`` on each GPU for what it works on."""

    num_gpus: int
    num_nodes: int
    weights_bytes: float  # of one GPU
    room: Capacity

    def context_bytes(self, *, num_sequences: int, num_tokens: int) -> float:
        """Of a GPU, for sequences of that length at once."""
        return num_sequences * self.room.needed_bytes(num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the job. ``address``: of the services on it, as the others must reach it."""

    name: str
    num_gpus: int
    does: tuple[str, ...]
    address: str


def serving(accelerator: Accelerator, target: ServedTarget, *, memory_utilisation: float) -> Serving:
    """The fewest GPUs whose memory holds the target, in whole nodes where it takes more than one.

    Raises:
        ValueError: not even all GPUs of one link domain hold it.
    """
    fewest = fewest_gpus(accelerator, target, None, memory_utilisation=memory_utilisation)
    num_nodes = ceil(fewest / accelerator.gpus_per_node)
    num_gpus = fewest if num_nodes == 1 else num_nodes * accelerator.gpus_per_node
    return Serving(
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        weights_bytes=target.weights_bytes(num_gpus),
        room=capacity(accelerator, target, None, num_gpus=num_gpus, memory_utilisation=memory_utilisation),
    )


def place(
    found: Serving | None,
    accelerator: Accelerator,
    *,
    num_sets: int,
    num_training_nodes: int,
    num_ranks: int,
    captures: bool,
    one_machine: bool,
    mooncake_port: int = 50051,
    server_port: int = 8000,
) -> Sequence[Node]:
    """Serving nodes set by set, then training nodes. Ranks and services count from 0; ``found`` None: of unknown size.

    ``one_machine``: a single node does everything (``cluster=local``).
    """
    nodes = []
    if captures and found is None:
        nodes.append(_node(0, 0, ["mooncake_master, segment of Mooncake, vLLM"], []))
    for number in range(num_sets if captures and found else 0):
        assert found is not None
        for rank in range(found.num_nodes):
            does = ["mooncake_master"] * (number == 0 and rank == 0)
            does.append(f"vLLM of set {number}, rank {rank} of {found.num_nodes}" + (" (headless)" if rank else ""))
            does += ["segment of Mooncake"] * (rank == 0)
            ports = [f":{mooncake_port}"] * (number == 0 and rank == 0) + [f":{server_port}"] * (rank == 0)
            gpus = min(found.num_gpus, accelerator.gpus_per_node)
            nodes.append(_node(len(nodes), gpus, does, ports))
    per_node = ceil(num_ranks / num_training_nodes)
    for first in range(0, num_ranks, per_node):
        last = min(first + per_node, num_ranks) - 1
        ranks = f"trainer rank {first}" if first == last else f"trainer ranks {first} to {last}"
        nodes.append(_node(len(nodes), last - first + 1, [ranks], []))
    if not one_machine:
        return nodes
    server = f"vLLM on {num_sets * found.num_gpus} GPUs" if found else "vLLM"
    services = ("mooncake_master", "segment of Mooncake", server)
    return [
        Node(
            name="this machine",
            num_gpus=sum(node.num_gpus for node in nodes),
            does=(*(services if captures else ()), *nodes[-1].does),
            address="loopback",
        )
    ]


def _node(number: int, num_gpus: int, does: Sequence[str], ports: Sequence[str]) -> Node:
    address = f"its address on the fast fabric, {', '.join(ports)}" if ports else "its address on the fast fabric"
    return Node(name=f"node {number}", num_gpus=num_gpus, does=tuple(does), address=address)
