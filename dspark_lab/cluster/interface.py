"""The network interface of this machine that lies in a subnet, and commands that are to use it.

``python -m dspark_lab.cluster.interface SUBNET COMMAND ...`` becomes the command, with the variables by which NCCL, Gloo,
vLLM and Mooncake find the interface, and with ``{address}`` in its arguments replaced. Without a command it prints node and
address. An empty SUBNET stands for the interface that has the address of the machine's own name.

Ranks that pick different interfaces hang at rendezvous without an error, and a machine has several: hence this.
"""

import os
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

import psutil


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    address: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "NCCL_SOCKET_IFNAME": self.name,
            "GLOO_SOCKET_IFNAME": self.name,
            "VLLM_HOST_IP": self.address,
            "MOONCAKE_LOCAL_HOSTNAME": self.address,
        }


def interfaces() -> list[Interface]:
    """Of this machine, one entry for each IPv4 address."""
    return [
        Interface(name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def choose(subnet: str, present: Sequence[Interface], own_addresses: Iterable[str]) -> Interface:
    """The first interface of ``subnet``, or without one, the first that has one of ``own_addresses``.

    Raises:
        ValueError: there is none, or ``subnet`` is no subnet.
    """
    if subnet:
        try:
            network = ip_network(subnet)
        except ValueError as error:
            raise ValueError(f"cluster.subnet={subnet!r}: {error}; e.g. 10.1.0.0/16") from error
        found = [entry for entry in present if ip_address(entry.address) in network]
    else:
        own = set(own_addresses)
        found = [entry for entry in present if entry.address in own]
    if not found:
        wanted = f"in cluster.subnet={subnet}" if subnet else "with the address of its name; set cluster.subnet"
        there = ", ".join(f"{entry.name} {entry.address}" for entry in present)
        raise ValueError(f"{socket.gethostname()} has no interface {wanted} (there are: {there})")
    return found[0]


def addresses_of_this_name() -> list[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        return []


def main(subnet: str, command: Sequence[str]) -> None:
    try:
        chosen = choose(subnet, interfaces(), addresses_of_this_name())
    except ValueError as error:
        sys.exit(f"error: {error}")
    if not command:
        print(os.environ.get("SLURMD_NODENAME", socket.gethostname()), chosen.address)
        return
    told = [argument.replace("{address}", chosen.address) for argument in command]
    os.execvpe(told[0], told, {**os.environ, **chosen.environment})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
