"""One batch script for a run on a Slurm cluster: a step for each role, from the template ``slurm.sh.jinja``.

Nodes in Slurm's order: ``num_sets`` x ``nodes_per_set`` for engines, then those of training. The script runs as a batch job,
or inside an allocation of that many nodes.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dspark_lab.cluster.services import master_arguments, role_of, segment_arguments
from dspark_lab.cluster.vllm import answer_arguments, capture_arguments, engine_environment, through_mooncake
from dspark_lab.signals import REQUEUE
from dspark_lab.store.mooncake_connection import MooncakeConnection
from dspark_lab.validation import checked

Word = Annotated[str, Field(coerce_numbers_to_str=True)]
"""Of a command: numbers as they stand in YAML."""

OWN_ADDRESS = "{address}"
"""Replaced on each node by its own (``cluster.interface``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRole:
    """How the steps of one role are started. None: this Python; no container."""

    python: str | None
    command_prefix: tuple[str, ...]
    container_image: str | None
    srun_options: tuple[str, ...]

    @property
    def options(self) -> Sequence[str]:
        """Of srun."""
        image = [f"--container-image={self.container_image}"] if self.container_image else []
        return [*image, *self.srun_options]

    def command(self, *arguments: str) -> list[str]:
        return role_of(self.python, self.command_prefix).command(*arguments)

    def on_interface(
        self, subnet: str | None, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> list[str]:
        """A command that uses, and knows, the node's interface in ``subnet``."""
        added = ["env", *(f"{name}={value}" for name, value in environment.items())] if environment else []
        python = role_of(self.python, ()).command(*arguments)
        return self.command("-m", "dspark_lab.cluster.interface", subnet or "", *added, *python)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRole(StepRole):
    """``arguments`` are further ones of the role's program."""

    arguments: tuple[Word, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    mooncake: ProgramRole
    vllm: ProgramRole
    training: StepRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    mooncake: int
    mooncake_admin: int
    segment: int
    vllm: int
    vllm_group: int
    training: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMooncake:
    """Its addresses are chosen: always None."""

    master_address: None
    admin_url: None
    local_hostname: None
    protocol: Literal["tcp", "rdma"]
    rdma_devices: str

    @property
    def of_connector(self) -> dict[str, Any]:
        connection = MooncakeConnection(
            master_address=variable("master"), admin_url=None, protocol=self.protocol, rdma_devices=self.rdma_devices,
            local_hostname=OWN_ADDRESS,
        )  # fmt: skip
        return connection.of_connector


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """``segment_bytes`` on the first node of each set, ``lease_s`` for one transfer."""

    segment_bytes: int
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What the vLLM servers are for: they answer prompts, capture the states entering ``layer_ids``, or both in turn."""

    model: str  # folder or hub id
    revision: str | None
    layer_ids: tuple[int, ...]
    dtype: str
    answers: bool
    captures: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the job is to do. ``arguments``: of ``python -m dspark_lab``, without stages and cluster."""

    name: str
    folder: Path  # of the run
    arguments: tuple[str, ...]
    before: tuple[str, ...]  # stages in one process
    train: bool
    after: tuple[str, ...]
    num_nodes: int  # of training
    ranks_per_node: int
    engine: Engine | None
    stores_in_mooncake: bool


class SlurmJob:
    """Renders the script, submits it."""

    @checked
    def __init__(
        self,
        *,
        submit: bool,
        num_sets: PositiveInt,
        nodes_per_set: PositiveInt,
        gpus_per_node: NonNegativeInt,
        partition: str | None,
        account: str | None,
        time_limit: str | None,
        save_before_s: PositiveInt,
        sbatch_options: tuple[str, ...],
        subnet: str | None,
        environment: dict[str, Word],
        container_image: str | None,
        deadline_s: PositiveFloat,
        grace_s: NonNegativeFloat,
        mooncake: JobMooncake,
        storage: Storage,
        ports: Ports,
        roles: Roles,
    ) -> None:
        self.submit, self.num_sets, self.nodes_per_set, self.gpus_per_node = (
            submit,
            num_sets,
            nodes_per_set,
            gpus_per_node,
        )
        self.partition, self.account, self.time_limit = partition, account, time_limit
        self.save_before_s, self.sbatch_options, self.subnet = save_before_s, sbatch_options, subnet
        self.environment = environment
        self.deadline_s, self.grace_s = deadline_s, grace_s
        self.mooncake, self.storage, self.ports, self.roles = mooncake, storage, ports, roles

    def num_engine_nodes(self, *, engines: bool) -> int:
        return self.num_sets * self.nodes_per_set if engines else 0

    def num_nodes(self, *, num_training_nodes: int, engines: bool) -> int:
        return self.num_engine_nodes(engines=engines) + num_training_nodes

    def render(self, work: Work) -> str:
        """The batch script."""
        template = _templates().get_template("slurm.sh.jinja")
        num_engine_nodes = self.num_engine_nodes(engines=work.engine is not None)
        return template.render(
            job=self,
            work=work,
            directives=list(self._directives(work)),
            num_nodes=self._num_nodes(work),
            num_engine_nodes=num_engine_nodes,
            sets=[range(first, first + self.nodes_per_set) for first in range(0, num_engine_nodes, self.nodes_per_set)],
            requeue=REQUEUE,
            **self._commands(work),
        )

    def _num_nodes(self, work: Work) -> int:
        return self.num_nodes(num_training_nodes=work.num_nodes, engines=work.engine is not None)

    def _directives(self, work: Work) -> Iterator[str]:
        """Of ``#SBATCH`` lines."""
        yield f"--job-name={work.name}"
        yield f"--nodes={self._num_nodes(work)}"
        for name in ("partition", "account"):
            if value := getattr(self, name):
                yield f"--{name}={value}"
        if self.time_limit:
            yield f"--time={self.time_limit}"
        if self.gpus_per_node:
            yield f"--gpus-per-node={self.gpus_per_node}"
        yield f"--signal=B:USR1@{self.save_before_s}"
        yield "--requeue"
        yield "--open-mode=append"
        yield f"--chdir={Path.cwd()}"
        yield f"--output={work.folder / 'logs' / 'job.log'}"
        yield from self.sbatch_options

    def _commands(self, work: Work) -> dict[str, str]:
        """Of the steps, as bash writes them."""
        roles, ports = self.roles, self.ports
        mooncake = roles.mooncake
        master = master_arguments(
            OWN_ADDRESS, port=ports.mooncake, admin_port=ports.mooncake_admin, lease_s=self.storage.lease_s
        )
        segment = segment_arguments(
            OWN_ADDRESS, port=ports.segment, master=variable("master"), num_bytes=self.storage.segment_bytes,
            protocol=self.mooncake.protocol, rdma_devices=self.mooncake.rdma_devices,
        )  # fmt: skip
        python = roles.training.command("-m")
        commands = {
            "addresses": [*python, "dspark_lab.cluster.interface", self.subnet or ""],
            "master_command": mooncake.on_interface(self.subnet, *master, *mooncake.arguments),
            "segment_command": mooncake.on_interface(self.subnet, *segment),
            "ready": [*python, "dspark_lab.cluster.ready", f"--deadline={self.deadline_s:g}"],
            "lab": roles.training.on_interface(self.subnet, "-m", "dspark_lab", *work.arguments, *self._joined(work)),
        }
        if work.engine:
            commands |= self._engine_commands(work.engine)
        return {name: in_bash(command) for name, command in commands.items()}

    def _joined(self, work: Work) -> list[str]:
        """Overrides with which a process uses the job's services."""
        joined = ["cluster=attach"]
        if work.engine or work.stores_in_mooncake:
            joined += [
                f"cluster.mooncake.master_address={variable('master')}",
                f"cluster.mooncake.admin_url={variable('admin')}",
                f"cluster.mooncake.protocol={self.mooncake.protocol}",
                f"cluster.mooncake.rdma_devices='{self.mooncake.rdma_devices}'",
                f"cluster.mooncake.local_hostname={OWN_ADDRESS}",
            ]
        if work.stores_in_mooncake:
            joined.append(f"store.generation={variable('generation')}")
        if work.engine:
            joined.append(f"engine.endpoints=[{variable('endpoints')}]")
        return joined

    def _engine_commands(self, engine: Engine) -> dict[str, list[str]]:
        vllm, on_cpu, spread = self.roles.vllm, self.gpus_per_node == 0, self.nodes_per_set > 1
        if spread:  # api_server knows no --headless
            program = ["-m", "vllm.entrypoints.cli.main", "serve", engine.model]
        else:
            program = ["-m", "vllm.entrypoints.openai.api_server", "--model", engine.model]
        environment = engine_environment(on_cpu=on_cpu, interpret=False)
        return {
            "vllm": vllm.on_interface(
                self.subnet,
                *program,
                *(["--revision", engine.revision] if engine.revision else []),
                *(["--enforce-eager"] if on_cpu else []),
                *("--dtype", engine.dtype, "--generation-config", "vllm", *vllm.arguments),
                environment={name: value for name, value in environment.items() if name not in self.environment},
            ),
            "answering": answer_arguments(on_cpu=on_cpu),
            "capturing": capture_arguments(engine.layer_ids, transfer=through_mooncake(self.mooncake.of_connector)),
        }


def variable(name: str) -> str:
    """Stands for a variable of the script in an argument; ``in_bash`` writes it."""
    return f"@{{{name}}}@"


def in_bash(arguments: Sequence[str]) -> str:
    """The arguments quoted for bash, with ``variable``s left to it."""
    return " ".join(re.sub(r"@\{(\w+)\}@", r"""'"$\1"'""", shlex.quote(argument)) for argument in arguments)


def submit(script: Path) -> str:
    """Hand the script to Slurm; its job id.

    Raises:
        ValueError: there is no sbatch, or it refuses.
    """
    if shutil.which("sbatch") is None:
        raise ValueError("cluster.submit=true: there is no sbatch on this machine; give the command where there is one")
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"sbatch refused {script}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def _templates() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, comment_start_string="{##", comment_end_string="##}",  # bash has ${#
    )  # fmt: skip
    made.filters["bash"] = lambda words: in_bash([words] if isinstance(words, str) else words)
    return made
