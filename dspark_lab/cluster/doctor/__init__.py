"""Is this machine fit for what a config asks of it? Checks that are quick and change nothing, each with its mend.

A check is a function of a ``Patient`` (what the config asks, and how to look at the machine). One that fails, or breaks,
never stops the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dspark_lab.cluster.doctor.look import Look
from dspark_lab.cluster.neighbours import Step

State = Literal["ok", "warned", "failed", "skipped"]
Package = tuple[str, ...]
"""Names of distributions of which one must be installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """*warned*: may work, look at it; *failed*: will not work; *skipped*: nothing here asks for it."""

    check: str
    state: State
    told: str
    mend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRole:
    """Processes of a run, and what their Python must have.

    ``key``: of the config, below which ``python`` and ``command_prefix`` are; None where there is no choice.
    ``command``: starts that Python.
    ``looked_into_by``: the command of a doctor in the container that this one cannot start.
    """

    name: str
    key: str | None
    command: Sequence[str]
    packages: Sequence[Package]
    looked_into_by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the config needs of a machine. ``architecture`` and ``gpus_per_node`` of its hardware; None: any."""

    gpus_per_node: int
    gpu_bytes: float
    architecture: str | None
    several_machines: bool
    roles: Sequence[AskedRole]
    needs_mooncake: bool
    mooncake_runs: bool  # started by others: it must answer; else its ports must be free
    master_address: str | None
    admin_url: str | None
    protocol: str
    rdma_devices: str
    advertised: str  # address of this machine that others are told, or a name for it
    subnet: str | None  # of a Slurm job, which takes the address in it; "": that of the node's name
    step: Step | None  # of Slurm, of which this is one process
    segment_bytes: int
    buffer_bytes: int
    endpoints: Sequence[str]
    model: str
    num_states: int  # of a token
    layer_ids: Sequence[int] | None  # which they enter, the number of layers for the last one; None: not known here
    disk_bytes: float
    home: str
    wandb: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """``look``: how to see the machine; tests give it faults."""

    asked: Asked
    look: Look
    environment: Mapping[str, str]


Check = Callable[[Patient], Sequence[Finding]]


def examine(patient: Patient, checks: Mapping[str, Check]) -> list[Finding]:
    """Findings of all checks, in their order. A check that breaks is a failed one."""
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            found += check(patient)
        except Exception as error:
            found.append(
                Finding(
                    check=name,
                    state="failed",
                    told=f"could not be checked: {type(error).__name__}: {error}",
                    mend="look at it by hand, and tell us: a check should not break",
                )
            )
    return found


def ok(check: str, told: str) -> Finding:
    return Finding(check=check, state="ok", told=told)


def skipped(check: str, told: str) -> Finding:
    return Finding(check=check, state="skipped", told=told)


def warned(check: str, told: str, mend: str) -> Finding:
    return Finding(check=check, state="warned", told=told, mend=mend)


def failed(check: str, told: str, mend: str) -> Finding:
    return Finding(check=check, state="failed", told=told, mend=mend)
