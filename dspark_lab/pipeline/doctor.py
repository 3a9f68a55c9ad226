"""Stage *doctor*: whether this machine is fit for the config, before anything expensive."""

import json
import os
import platform
from dataclasses import asdict

from omegaconf import OmegaConf
from rich.table import Table

from dspark_lab.cluster.doctor import Asked, Check, Finding, Patient, examine
from dspark_lab.cluster.doctor.checks import CHECKS
from dspark_lab.cluster.doctor.look import Look
from dspark_lab.cluster.neighbours import Step
from dspark_lab.hardware.accelerator import Accelerator
from dspark_lab.nothere import Missing
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.plan import made_plan, segment_bytes
from dspark_lab.progress import console

ARCHITECTURES = {"gb300_nvl72": "aarch64"}  # of the nodes; others are x86_64 or whatever is here
HERE = ("versions", "processor", "GPUs", "engine", "weights")
"""Checks that say what a machine lacks for a job, whatever services it may start."""
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
        needs_mooncake=choices["store"] == "mooncake" or choices["engine"] == "vllm",
        needs_vllm=choices["engine"] == "vllm",
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
        num_layer_ids=len(config.target.layer_ids or (0, 0, 0)),
        disk_bytes=disk_bytes,
        home=str(parts.home),
        wandb=choices["logger"] == "wandb",
    )
    return Patient(asked=asked, look=Look(), environment=os.environ)
