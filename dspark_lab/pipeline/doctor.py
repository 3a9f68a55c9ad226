"""Stage *doctor*: whether this machine is fit for the config, before anything expensive."""

import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from dspark_lab.cluster.doctor import Asked, AskedRole, Check, Finding, Package, Patient, examine
from dspark_lab.cluster.doctor.checks import CHECKS
from dspark_lab.cluster.doctor.look import Look
from dspark_lab.cluster.doctor.packages import HS_CONNECTORS, LAB, MOONCAKE, TRAINING, VLLM, WANDB
from dspark_lab.cluster.neighbours import Step
from dspark_lab.cluster.services import role_of
from dspark_lab.hardware.accelerator import Accelerator
from dspark_lab.nothere import Missing
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.plan import made_plan, segment_bytes
from dspark_lab.progress import console

ARCHITECTURES = {"gb300_nvl72": "aarch64"}  # of the nodes; others are x86_64 or whatever is here
HERE = ("versions", "processor", "GPUs", "weights")
"""Checks that say what a machine lacks for a job, whatever services it may start."""
ROLES: Mapping[str, Mapping[str, str]] = {
    "slurm": {name: f"cluster.roles.{name}" for name in ("mooncake", "vllm", "training")},
    "local": {"mooncake": "cluster.storage", "vllm": "cluster.vllm"},
}
"""Where a cluster's config says how its processes are started; those of training are otherwise this Python's."""
COLOURS = {"ok": "green", "warned": "yellow", "failed": "red", "skipped": "dim"}


class UnfitError(ValueError):
    """Some checks failed; the message names each with its mend."""


def doctor(parts: Parts) -> Outcome:
    """Print all findings, write ``<run>/doctor.json`` (``doctor-<host>.json`` where several nodes do so at once).

    Raises:
        UnfitError: some checks failed.
    """
    patient = patient_of(parts, disk_bytes=disk_bytes_of(parts))
    findings = examine(patient, CHECKS)
    host = platform.node()
    name = "doctor.json" if patient.asked.step is None else f"doctor-{host}.json"
    told = {"host": host, "findings": [asdict(finding) for finding in findings]}
    (parts.run.directory / name).write_text(json.dumps(told, indent=1))
    show(findings, title=f"doctor on {host}")
    failed = [f"{finding.check}: {finding.told} ({finding.mend})" for finding in findings if finding.state == "failed"]
    if failed:
        raise UnfitError(f"{host} is not fit for this config: " + "; ".join(failed))
    return {}, []


def disk_bytes_of(parts: Parts) -> float:
    """What the plan needs; a gigabyte where nothing can be planned (a measured profile)."""
    if parts.info.choices["hardware"] == "measured":
        return 1e9
    found = made_plan(parts).figures["disk_bytes"]
    assert not isinstance(found, str)
    return found


def missing_here(parts: Parts) -> list[Missing]:
    """What a job of this config needs and this machine lacks: the doctor's checks that take no time."""
    checks: dict[str, Check] = {name: CHECKS[name] for name in HERE}
    found = examine(patient_of(parts), checks)
    return [Missing(f"{entry.check}: {entry.told}", entry.mend) for entry in found if entry.state == "failed"]


def show(findings: list[Finding], *, title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name in ("check", "", "found", "mend"):
        table.add_column(name)
    for finding in findings:
        colour = COLOURS[finding.state]
        table.add_row(finding.check, f"[{colour}]{finding.state}[/{colour}]", finding.told, finding.mend)
    console.print(table)


def patient_of(parts: Parts, *, disk_bytes: float = 0) -> Patient:
    config, choices = parts.config, parts.info.choices
    hardware = build(config, "hardware")
    is_gpu = isinstance(hardware, Accelerator) and hardware.name != "cpu"
    mooncake, cluster = config.cluster.mooncake, choices["cluster"]
    attached = cluster == "attach"
    asked = Asked(
        gpus_per_node=hardware.gpus_per_node if is_gpu else 0,
        gpu_bytes=hardware.memory_bytes if is_gpu else 0,
        architecture=ARCHITECTURES.get(hardware.name),
        several_machines=cluster == "slurm" or config.trainer.num_nodes > 1,
        roles=roles_of(config, choices, command=parts.info.command),
        needs_mooncake=needs_mooncake(config, choices),
        mooncake_runs=attached,
        master_address=mooncake.master_address if attached else None,
        admin_url=mooncake.admin_url,
        protocol=mooncake.protocol,
        rdma_devices=mooncake.rdma_devices,
        subnet=(config.cluster.subnet or "") if cluster == "slurm" else None,
        step=Step.found(parts.run.directory / "doctor"),
        advertised=mooncake.local_hostname or os.environ.get("MOONCAKE_LOCAL_HOSTNAME") or platform.node(),
        segment_bytes=segment_bytes(config) or 0,
        buffer_bytes=config.plan.buffer_bytes,
        endpoints=[str(url).rstrip("/") for url in OmegaConf.select(config, "engine.endpoints") or []],
        model=config.target.model,
        num_states=len(config.target.layer_ids or (0, 0, 0)) + 1,
        layer_ids=layer_ids_of(config),
        disk_bytes=disk_bytes,
        home=str(parts.home),
        wandb=choices["logger"] == "wandb",
    )
    return Patient(asked=asked, look=Look(), environment=os.environ)


def layer_ids_of(config: DictConfig) -> list[int] | None:
    """Of a server's states, as it is started with them; None where only the target's files tell."""
    target = config.target
    return [*target.layer_ids, target.num_layers] if target.layer_ids and target.num_layers else None


def needs_mooncake(config: DictConfig, choices: Mapping[str, str]) -> bool:
    """Whether states are kept in it, or come from servers through it."""
    return choices["store"] == "mooncake" or (choices["engine"] == "vllm" and config.engine.payload_folder is None)


def roles_of(config: DictConfig, choices: Mapping[str, str], *, command: str) -> list[AskedRole]:
    """The run's own processes and those that it starts. ``command``: of the run, which a doctor in a container needs."""
    keys = ROLES.get(choices["cluster"], {})
    mooncake = [MOONCAKE] if needs_mooncake(config, choices) else []
    needs = {
        # In a job dspark_lab finds the node's address for it.
        "mooncake": [*mooncake, LAB] if mooncake and choices["cluster"] == "slurm" else mooncake,
        "vllm": [VLLM, LAB, *([HS_CONNECTORS, *mooncake] if mooncake else [])] if choices["engine"] == "vllm" else [],
        "training": [*TRAINING, LAB, *mooncake, *([WANDB] if choices["logger"] == "wandb" else [])],
    }
    started = [name for name, packages in needs.items() if packages and (name in keys or name == "training")]
    return [_role(name, keys.get(name), config, packages=needs[name], command=command) for name in started]


def _role(name: str, key: str | None, config: DictConfig, *, packages: Sequence[Package], command: str) -> AskedRole:
    recipe = OmegaConf.select(config, key) if key else OmegaConf.create({"python": None, "command_prefix": []})
    own, image = role_of(recipe.python, tuple(recipe.command_prefix)).command(), recipe.get("container_image")
    inside = None
    if image:
        srun = ["srun", "--nodes=1", "--ntasks=1", f"--container-image={image}", *recipe.srun_options, *own]
        run = command.removeprefix("python ")
        inside = f"{shlex.join(srun)} {run} stages=doctor {key}.container_image=null"
    return AskedRole(name=name, key=key, command=own, packages=packages, looked_into_by=inside)
