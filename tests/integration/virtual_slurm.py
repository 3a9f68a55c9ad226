"""A real Slurm on this machine: virtual nodes, each in a network namespace of its own, on a bridge.

Each node has an interface ``fab0`` in the subnet of the "fast fabric", and a second one, ``mgmt0``, to which its name
resolves: whoever takes an address by name alone takes the wrong interface. Needs root, slurm-wlm, munge and iproute2.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "nsenter", "unshare")
FABRIC, MANAGEMENT = "10.77.1", "10.77.2"  # /24 each
SUBNET = f"{FABRIC}.0/24"
CONF = """
ClusterName=virtual
SlurmctldHost={host}({management}.1)
SlurmctldPort=16817
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/munge.socket.2
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait=3
SlurmdTimeout=60
MessageTimeout=60
NodeName={names} NodeAddr={addresses} NodeHostname={names} Port=16818 CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverTimeLimit=0
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


class VirtualSlurm:
    """Runs from construction until ``close``; ``environment`` makes its commands reach it.

    Raises RuntimeError when the nodes do not become idle.
    """

    def __init__(self, folder: Path, *, num_nodes: int) -> None:
        self.folder = folder
        self.nodes = [f"gb{index}" for index in range(num_nodes)]
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._tag = f"v{os.getpid() % 10000}"
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._write_files()
            self._connect()
            self._start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for daemon in reversed(self._daemons):
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()
        for node in self.nodes:  # what a job has left, too
            found = subprocess.run(["ip", "netns", "pids", self._space(node)], capture_output=True, text=True)
            for pid in found.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", self._space(node)], stderr=subprocess.DEVNULL)
        for kind in "fm":
            subprocess.run(["ip", "link", "del", self._tag + kind], stderr=subprocess.DEVNULL)

    def call(self, *command: str) -> str:
        """One of Slurm's commands; what it prints."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    @contextmanager
    def no_route(self, *, node: str, to: str) -> Iterator[None]:
        """Within, ``node`` finds no way to ``to`` in the fabric, nor back what is asked from there."""
        route = f"blackhole {FABRIC}.{10 + self.nodes.index(to)}/32"
        ip(f"-n {self._space(node)} route add {route}")
        try:
            yield
        finally:
            ip(f"-n {self._space(node)} route del {route}")

    def _space(self, node: str) -> str:
        return f"{self._tag}{node}"

    def _write_files(self) -> None:
        for name in ("munge", "state"):
            (self.folder / name).mkdir(mode=0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        last = len(self.nodes) - 1
        host = socket.gethostname().split(".")[0]
        (self.folder / "slurm.conf").write_text(
            CONF.format(
                host=host,
                folder=self.folder,
                management=MANAGEMENT,
                names=f"gb[0-{last}]",
                addresses=f"{MANAGEMENT}.[10-{10 + last}]",
            )
        )
        names = [f"{MANAGEMENT}.{10 + index} {node}" for index, node in enumerate(self.nodes)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{MANAGEMENT}.1 {host}", *names, ""]))

    def _connect(self) -> None:
        for kind, network in (("f", FABRIC), ("m", MANAGEMENT)):
            ip(f"link add {self._tag}{kind} type bridge")
            ip(f"addr add {network}.1/24 dev {self._tag}{kind}")
            ip(f"link set {self._tag}{kind} up")
        for index, node in enumerate(self.nodes):
            space = self._space(node)
            ip(f"netns add {space}")
            ip(f"-n {space} link set lo up")
            for kind, network, name in (("m", MANAGEMENT, "mgmt0"), ("f", FABRIC, "fab0")):
                outer = f"{self._tag}{kind}{index}"
                ip(f"link add {outer} type veth peer name {name} netns {space}")
                ip(f"link set {outer} master {self._tag}{kind} up")
                ip(f"-n {space} addr add {network}.{10 + index}/24 dev {name}")
                ip(f"-n {space} link set {name} up")

    def _start(self) -> None:
        munge = self.folder / "munge"
        files = [f"--{kind}-file={munge / kind}" for kind in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={munge / 'munge.socket.2'}", *files)
        wait_until(lambda: (munge / "munge.socket.2").exists(), "munged has no socket")
        self._daemon("slurmctld", "-D", "-c")
        for node in self.nodes:
            own = f"mount --bind {self.folder / 'hosts'} /etc/hosts && hostname {node} && exec slurmd -D -N {node}"
            inside = ["nsenter", f"--net=/run/netns/{self._space(node)}"]
            self._daemon(*inside, "unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", own)
        wait_until(lambda: self.num_idle() == len(self.nodes), f"the nodes are not idle; logs in {self.folder}")

    def num_idle(self) -> int:
        with suppress(RuntimeError):
            return self.call("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").count("gb")
        return 0

    def _daemon(self, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            environment = {**os.environ, **self.environment}
            made = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self._daemons.append(made)


def ip(arguments: str) -> None:
    done = subprocess.run(["ip", *arguments.split()], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {arguments}: {done.stderr}")


def wait_until(condition: Callable[[], bool], told: str, *, deadline_s: float = 30) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(told)
        time.sleep(0.1)
