"""The doctor's checks of the network: the address that others are told, and whether nodes reach each other at theirs."""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address, ip_network

from dspark_lab.cluster.doctor import Check, Finding, Patient, failed, ok, skipped, warned
from dspark_lab.cluster.neighbours import Neighbour, Node

SUBNET_MEND = "set cluster.subnet to that of the fast fabric, in which every node has an address, e.g. 10.1.0.0/16"
MANY_NODES_MEND = (
    "set cluster.mooncake.local_hostname (or MOONCAKE_LOCAL_HOSTNAME) to this node's address on the fast fabric"
)


def network(patient: Patient) -> Sequence[Finding]:
    """The address that others are told, and the interfaces that NCCL and gloo take: one fabric, or ranks hang in silence."""
    asked, look = patient.asked, patient.look
    if not asked.needs_mooncake:
        return [skipped("network", "no service has an address")]
    mend = MANY_NODES_MEND if asked.subnet is None else SUBNET_MEND
    try:
        address = _own_address(patient)
    except OSError:
        return [failed("network", f"{asked.advertised} resolves to no address here", mend)]
    except ValueError as error:
        return [failed("network", str(error), mend)]
    interfaces = look.interfaces()
    owner = next((name for name, (_, addresses) in interfaces.items() if address in addresses), None)
    if owner is None:
        known = ", ".join(f"{name} {' '.join(addresses)}" for name, (_, addresses) in interfaces.items() if addresses)
        return [failed("network", f"no interface has {address} (there are {known})", mend)]
    found = []
    if asked.several_machines and address.startswith("127."):
        told = f"others are told {address}, where they would find themselves"
        found.append(failed("network", told, mend))
    elif not interfaces[owner][0]:
        found.append(failed("network", f"{owner} with {address} is down", f"ip link set {owner} up"))
    else:
        try:
            look.connects_to_itself(address)
            found.append(ok("network", f"{address} on {owner}"))
        except OSError as error:
            found.append(failed("network", f"{address} cannot be connected to: {error}", "look at the firewall"))
    return [*found, *_collective_interfaces(patient, interfaces, owner)]


def _own_address(patient: Patient) -> str:
    """That others are told: a Slurm job takes it from the interface in its subnet. OSError, ValueError: there is none."""
    asked, look = patient.asked, patient.look
    return look.resolve(asked.advertised) if asked.subnet is None else look.address_in(asked.subnet)


def _collective_interfaces(
    patient: Patient, interfaces: Mapping[str, tuple[bool, Sequence[str]]], owner: str
) -> list[Finding]:
    found, several = [], patient.asked.several_machines
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        chosen = patient.environment.get(variable, "").lstrip("=^").split(",")[0]
        mend = (
            f"export {variable}={owner} on every node: ranks on different fabrics hang at rendezvous without an error"
        )
        if not chosen:
            if several and patient.asked.subnet is None:  # else the job sets it
                found.append(warned("interfaces", f"{variable} is not set: each rank takes the first it finds", mend))
        elif not any(name.startswith(chosen) for name in interfaces):
            found.append(failed("interfaces", f"{variable}={chosen}: there is none of that name", mend))
        elif not owner.startswith(chosen):
            found.append(failed("interfaces", f"{variable}={chosen}, but Mooncake's address is on {owner}", mend))
    return found or [ok("interfaces", owner)]


def neighbours(patient: Patient) -> Sequence[Finding]:
    """All nodes of a step of Slurm connect to all, at the addresses that the job would use: every way is tried."""
    asked, look = patient.asked, patient.look
    if asked.step is None:
        return [skipped("neighbours", "one machine alone; srun --ntasks-per-node=1 tries all ways between the nodes")]
    try:
        address = _own_address(patient)
    except (OSError, ValueError):
        address = asked.advertised  # the others are told that nobody can listen there
    own = Node(name=look.name(), address=address, networks=look.networks())
    found = [finding for neighbour in look.meet(asked.step, own) for finding in _between(own, neighbour)]
    return found or [ok("neighbours", f"{asked.step.num_tasks} nodes reach each other, both ways; this is {own}")]


def _between(own: Node, neighbour: Neighbour) -> list[Finding]:
    node = neighbour.node
    broken = {f"{own} -> {node}": neighbour.reached, f"{node} -> {own}": neighbour.reaches}
    told = "; ".join(f"{way}: {why or 'works'}" for way, why in broken.items())
    shared = set(own.networks) & set(node.networks)
    used = {network for network in shared if _holds(network, own) and _holds(network, node)}
    others = sorted(shared - used)
    both = f"both have an address in {' and in '.join(others)}: set cluster.subnet to the fast one" if others else ""
    if any(broken.values()):
        return [failed("neighbours", told, "look at firewall and routes between the two" + "; or " * bool(both) + both)]
    apart = f"{own} and {node} are addresses of different networks"
    return [warned("neighbours", apart, both)] if both and not used else []


def _holds(network: str, node: Node) -> bool:
    try:
        return ip_address(node.address) in ip_network(network)
    except ValueError:  # a name, of a node that has no address
        return False


NETWORK: Mapping[str, Check] = {"network": network, "neighbours": neighbours}
