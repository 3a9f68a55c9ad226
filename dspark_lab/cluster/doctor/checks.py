"""The doctor's checks, and those of the machine itself: processor, GPUs, memory, disk, clock."""

from collections.abc import Mapping, Sequence

from dspark_lab.cluster.doctor import Check, Finding, Patient, failed, ok, skipped, warned
from dspark_lab.cluster.doctor.network import NETWORK
from dspark_lab.cluster.doctor.packages import versions
from dspark_lab.cluster.doctor.services import SERVICES

GIB = 2**30
ARM_WHEELS = "torch, triton, vllm and mooncake-transfer-engine have aarch64 ones in the tested versions"
MAX_SKEW_S = 5.0


def processor(patient: Patient) -> Sequence[Finding]:
    machine, page, asked = patient.look.architecture(), patient.look.page_bytes(), patient.asked
    found = [ok("processor", machine)]
    if asked.architecture not in (None, machine):
        mend = (
            f"run on a node of that hardware, with wheels for it ({ARM_WHEELS}), or choose hardware= for this machine"
        )
        found = [failed("processor", f"{machine}, the hardware's nodes are {asked.architecture}", mend)]
    odd = {"segment": asked.segment_bytes % page, "buffer": asked.buffer_bytes % page}
    crooked = [name for name, rest in odd.items() if rest]
    if crooked:
        mend = f"make it a multiple of {page:,} bytes (Grace's kernel has pages of 65,536)"
        found.append(failed("pages", f"the {' and the '.join(crooked)} of Mooncake is no whole number of pages", mend))
    else:
        found.append(ok("pages", f"{page:,} bytes"))
    return found


def gpus(patient: Patient) -> Sequence[Finding]:
    asked, found = patient.asked, patient.look.gpus()
    if asked.gpu_bytes == 0:
        return [skipped("GPUs", "this hardware is no GPU")]
    if len(found) < asked.gpus_per_node:
        mend = "run on a node of that hardware; if this is one: nvidia-smi, and CUDA_VISIBLE_DEVICES"
        return [failed("GPUs", f"{len(found)} visible, a node of this hardware has {asked.gpus_per_node}", mend)]
    smallest = min(size for _, size in found)
    if smallest < 0.9 * asked.gpu_bytes:
        told = f"{smallest / 1e9:.0f} GB, the hardware's have {asked.gpu_bytes / 1e9:.0f} GB"
        return [failed("GPUs", told, "choose the hardware= that is here, so that the plan is true")]
    driver = patient.look.driver()
    return [ok("GPUs", f"{len(found)} x {found[0][0]}, driver {driver or 'unknown'}")]


def memory(patient: Patient) -> Sequence[Finding]:
    asked, look = patient.asked, patient.look
    if not asked.needs_mooncake:
        return [skipped("memory", "nothing moves through Mooncake")]
    found = []
    limit, needed = look.memlock_bytes(), max(asked.buffer_bytes, 1)
    if limit is not None and limit < needed:
        told = f"{limit / GIB:.3g} GiB may be locked, a buffer of Mooncake has {needed / GIB:.3g} GiB"
        mend = "ulimit -l unlimited (limits.conf: * - memlock unlimited; Slurm: PropagateResourceLimitsExcept=MEMLOCK)"
        # Only RDMA locks what it registers.
        found.append(failed("memlock", told, mend) if asked.protocol == "rdma" else warned("memlock", told, mend))
    else:
        found.append(ok("memlock", "unlimited" if limit is None else f"{limit / GIB:.1f} GiB"))
    free = look.memory_bytes()
    if free < asked.segment_bytes:
        told = f"{free / GIB:.1f} GiB are free, a segment takes {asked.segment_bytes / GIB:.1f} GiB"
        found.append(failed("memory", told, "lower cluster.storage.segment_bytes, or end what fills the memory"))
    else:
        found.append(ok("memory", f"{free / GIB:.1f} GiB free"))
    return found


def disk(patient: Patient) -> Sequence[Finding]:
    free, needed = patient.look.free_bytes(patient.asked.home), patient.asked.disk_bytes
    if free < needed:
        told = f"{free / 1e9:,.0f} GB free at {patient.asked.home}, {needed / 1e9:,.0f} GB needed"
        return [failed("disk", told, "set DSPARK_LAB_HOME and run.root to a larger disk")]
    return [ok("disk", f"{free / 1e9:,.0f} GB free, {needed / 1e9:,.0f} GB needed")]


def clock(patient: Patient) -> Sequence[Finding]:
    look, mend = patient.look, "synchronise it (chrony or timesyncd): logs, leases and hub downloads go by it"
    if look.clock_s() < look.installed_s():
        return [failed("clock", "it is before this package was written", mend)]
    for url in patient.asked.endpoints:
        try:
            skew = look.clock_skew_s(f"{url}/health")
        except (OSError, TypeError):
            continue  # that it does not answer is told elsewhere
        if abs(skew) > MAX_SKEW_S:
            return [warned("clock", f"{skew:+.0f} s against {url}", mend)]
    return [ok("clock", "plausible")]


CHECKS: Mapping[str, Check] = {
    "versions": versions,
    "processor": processor,
    "GPUs": gpus,
    "memory": memory,
    "disk": disk,
    "clock": clock,
    **NETWORK,
    **SERVICES,
}
"""In the order in which a mend makes the next one possible."""
