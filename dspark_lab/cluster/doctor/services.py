"""The doctor's checks of what a run talks to: Mooncake, vLLM, the hub, W&B."""

from collections.abc import Mapping, Sequence
from typing import Any

from dspark_lab.capture.payloads import LAYER_IDS
from dspark_lab.cluster.doctor import Asked, Check, Finding, Patient

TRIAL_BYTES = 2**26


def ports(patient: Patient) -> Sequence[Finding]:
    """Of a master that others run: it listens. Of one that the run starts at a given address: nobody does yet."""
    asked = patient.asked
    if not asked.needs_mooncake or asked.master_address is None:
        return [Finding(check="ports", state="skipped", told="free ones are chosen when services start")]
    host, _, port = asked.master_address.rpartition(":")
    listens = patient.look.listens(host, int(port))
    if listens == asked.mooncake_runs:
        told = f"{asked.master_address} {'listens' if listens else 'is free'}"
        return [Finding(check="ports", state="ok", told=told)]
    if asked.mooncake_runs:
        mend = "start mooncake_master there, or name the right one (cluster.mooncake.master_address)"
        return [Finding(check="ports", state="failed", told=f"nothing listens at {asked.master_address}", mend=mend)]
    mend = "another job is on this node: end it, or choose another port (cluster.mooncake.master_address)"
    return [Finding(check="ports", state="failed", told=f"{asked.master_address} is taken", mend=mend)]


def mooncake(patient: Patient) -> Sequence[Finding]:
    """One object there and back."""
    asked = patient.asked
    if not asked.needs_mooncake or not asked.mooncake_runs:
        return [Finding(check="Mooncake", state="skipped", told="it is started by the run")]
    connection = {
        "master_address": asked.master_address,
        "protocol": asked.protocol,
        "rdma_devices": asked.rdma_devices,
        "local_hostname": asked.advertised,
    }
    try:
        put, get = patient.look.transfer(connection, TRIAL_BYTES)
    except ImportError as error:
        mend = "pip install mooncake-transfer-engine (-non-cuda without a GPU), after the system's libibverbs1"
        return [Finding(check="Mooncake", state="failed", told=f"this Python cannot load it: {error}", mend=mend)]
    except Exception as error:  # its client has errors of several kinds, all of which mean this
        mend = (
            "look at mooncake_master's log; a segment must be there, and reach this machine at the advertised address"
        )
        return [Finding(check="Mooncake", state="failed", told=f"put and get: {error}", mend=mend)]
    return [Finding(check="Mooncake", state="ok", told=f"put {put / 1e9:.2f}, get {get / 1e9:.2f} GB/s")]


def endpoints(patient: Patient) -> Sequence[Finding]:
    """Each vLLM server: alive, of this target, and capturing the wanted states."""
    asked = patient.asked
    if not asked.endpoints:
        return [Finding(check="vLLM", state="skipped", told="no servers are named (engine.endpoints)")]
    return [_endpoint(patient, url) for url in asked.endpoints]


def _endpoint(patient: Patient, url: str) -> Finding:
    asked, look = patient.asked, patient.look
    if not look.answers(f"{url}/health"):
        mend = "start it, or name the right address (engine.endpoints); its log says why it is not ready"
        return Finding(check="vLLM", state="failed", told=f"{url} does not answer", mend=mend)
    models: Any = look.get(f"{url}/v1/models")
    names = {str(name) for entry in models["data"] for name in (entry["id"], entry.get("root"))}
    if asked.model not in names and not any(name.endswith(asked.model) for name in names):
        mend = f"serve {asked.model} there, or choose the target that is served"
        return Finding(check="vLLM", state="failed", told=f"{url} serves {', '.join(sorted(names))}", mend=mend)
    reply: Any = look.post(f"{url}/v1/completions", {"prompt": [0], "max_tokens": 1, "temperature": 0})
    return _captured(asked, url, reply.get("kv_transfer_params") or {})


def _captured(asked: Asked, url: str, described: Mapping[str, Any]) -> Finding:
    """``described``: of the payload, in the server's reply. Through files only our connector tells what is in it."""
    told, wanted = described.get(LAYER_IDS), asked.layer_ids
    shape = described.get("tensors", {}).get("hidden_states", {}).get("shape")
    if told is None and shape is None:
        mend = "it only answers prompts; start one that captures (docs/capture_and_stores.md) for training"
        return Finding(check="vLLM", state="warned", told=f"{url} captures no states", mend=mend)
    mend = "start it with target.layer_ids and, as the last id, the number of layers"
    if told is not None and wanted is not None and list(told) != list(wanted):
        told = f"{url} captures the states entering layers {list(told)}, wanted are {list(wanted)}"
        return Finding(check="vLLM", state="failed", told=told, mend=mend)
    number = shape[1] if told is None else len(told)
    if number != asked.num_states:
        told = f"{url} captures {number} states of a token, {asked.num_states} are wanted"
        return Finding(check="vLLM", state="failed", told=told, mend=mend)
    if told is None or wanted is None:
        silent = "it does not tell" if told is None else "the config does not say"
        told = f"{url} captures {number} states of a token; {silent} of which layers"
    else:
        told = f"{url} captures the states entering layers {list(told)}"
    return Finding(check="vLLM", state="ok", told=told)


def weights(patient: Patient) -> Sequence[Finding]:
    model = patient.asked.model
    if patient.look.cached(model):
        return [Finding(check="weights", state="ok", told=f"{model} is here")]
    mend = f"hf download {model} on a shared disk (HF_HOME), or set target.model to its folder"
    return [Finding(check="weights", state="failed", told=f"{model} is not on this machine", mend=mend)]


def wandb(patient: Patient) -> Sequence[Finding]:
    if not patient.asked.wandb:
        return [Finding(check="W&B", state="skipped", told="logger is another one")]
    if patient.environment.get("WANDB_MODE") in ("offline", "disabled"):
        return [Finding(check="W&B", state="ok", told=f"WANDB_MODE={patient.environment['WANDB_MODE']}")]
    url = patient.environment.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if patient.look.answers(f"{url}/healthz"):
        return [Finding(check="W&B", state="ok", told=f"{url} answers")]
    return [
        Finding(check="W&B", state="failed", told=f"{url} does not answer", mend="WANDB_MODE=offline, or logger=csv")
    ]


SERVICES: Mapping[str, Check] = {
    "ports": ports,
    "Mooncake": mooncake,
    "vLLM": endpoints,
    "weights": weights,
    "W&B": wandb,
}
