"""How the doctor sees a machine: thin readings of the system, so that checks can be tested with other ones."""

import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from ipaddress import ip_interface
from pathlib import Path

import psutil
import torch

from dspark_lab.cluster.interface import addresses_of_this_name, choose, interfaces
from dspark_lab.cluster.neighbours import Neighbour, Node, Step, meet
from dspark_lab.nearby import DIRECT, answers, get_json, post_json

ANSWER_S = 60.0  # of a Python that a prefix may start in a container
_VERSIONS = """
import importlib.metadata, importlib.util, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "" if importlib.util.find_spec(name.replace("-", "_")) else None
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


class Look:
    """Every method is one reading; none changes anything."""

    def architecture(self) -> str:
        return platform.machine()

    def page_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE")

    def tested_versions(self) -> dict[str, str]:
        """Name -> version of ``constraints.txt``, beside the package's modules (a wheel) or the package (a clone)."""
        here = Path(__file__).parents[2]
        for folder in (here, here.parent):
            file = folder / "constraints.txt"
            if file.is_file():
                pairs = (line.split("==") for line in file.read_text().splitlines() if "==" in line)
                return {name.strip(): version.strip() for name, version in pairs}
        return {}

    def packages(self, command: Sequence[str], names: Sequence[str]) -> Mapping[str, str | None]:
        """Versions in the Python that ``command`` starts; None: not installed, "": it is there, of no distribution.

        OSError: the command cannot be run, fails, or has not told within ``ANSWER_S``.
        """
        with subprocess.Popen(
            [*command, "-c", _VERSIONS, *names], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                printed, complained = process.communicate(timeout=ANSWER_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise TimeoutError(f"no answer within {ANSWER_S:g} s") from None
        try:
            told = json.loads(printed.splitlines()[-1])  # behind what a prefix may say
            return {name: told[name] for name in names}
        except (IndexError, KeyError, TypeError, ValueError):
            last = (complained or printed).strip().splitlines()[-1:]
            raise OSError(f"exit status {process.returncode}: {''.join(last) or 'it says nothing'}") from None

    def gpus(self) -> Sequence[tuple[str, int]]:
        """(name, bytes) of each."""
        if not torch.cuda.is_available():
            return []
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [(device.name, device.total_memory) for device in found]

    def driver(self) -> str | None:
        if shutil.which("nvidia-smi") is None:
            return None
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return told[0] if told else None

    def interfaces(self) -> Mapping[str, tuple[bool, Sequence[str]]]:
        """Name -> (up, its IP addresses)."""
        up = psutil.net_if_stats()
        return {
            name: (
                name in up and up[name].isup,
                [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)],
            )
            for name, entries in psutil.net_if_addrs().items()
        }

    def name(self) -> str:
        return platform.node()

    def address_in(self, subnet: str) -> str:
        """ValueError where no interface is in it."""
        return choose(subnet, interfaces(), addresses_of_this_name()).address

    def networks(self) -> Sequence[str]:
        """Of this machine's IPv4 addresses but loopback's, as 10.1.0.0/16."""
        entries = [entry for each in psutil.net_if_addrs().values() for entry in each if entry.family == socket.AF_INET]
        found = [ip_interface(f"{entry.address}/{entry.netmask}") for entry in entries if entry.netmask]
        return sorted({str(each.network) for each in found if not each.is_loopback})

    def meet(self, step: Step, own: Node) -> Sequence[Neighbour]:
        return meet(step, own)

    def resolve(self, host: str) -> str:
        """OSError for a name that means nothing here."""
        return socket.gethostbyname(host)

    def connects_to_itself(self, address: str) -> bool:
        """Whether a connection to a listener on ``address`` of this machine comes through."""
        with (
            socket.create_server((address, 0)) as server,
            socket.create_connection(server.getsockname()[:2], timeout=3),
        ):
            return True

    def listens(self, host: str, port: int) -> bool:
        try:
            with socket.create_connection((host, port), timeout=3):
                return True
        except OSError:
            return False

    def memlock_bytes(self) -> int | None:
        """None: no limit."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft == resource.RLIM_INFINITY else soft

    def free_bytes(self, folder: str) -> int:
        path = Path(folder).expanduser()
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free

    def memory_bytes(self) -> int:
        return psutil.virtual_memory().available

    def clock_skew_s(self, url: str) -> float:
        """Of this clock against an HTTP server's. OSError when it does not answer."""
        with DIRECT.open(url, timeout=5) as response:
            return time.time() - parsedate_to_datetime(response.headers["Date"]).timestamp()

    def clock_s(self) -> float:
        return time.time()

    def installed_s(self) -> float:
        """When this package's files were written: no clock may be before."""
        return Path(__file__).stat().st_mtime

    def answers(self, url: str) -> bool:
        return answers(url, timeout_s=3)

    def get(self, url: str) -> object:
        return get_json(url, timeout_s=10)

    def post(self, url: str, body: Mapping[str, object]) -> object:
        return post_json(url, body, timeout_s=60)

    def cached(self, model: str) -> bool:
        """Whether a model's files are here: a folder, shipped with this package, or in the hub's cache."""
        from huggingface_hub import try_to_load_from_cache

        from dspark_lab.target.resolve import ASSETS

        if Path(model).expanduser().is_dir() or (ASSETS / model).is_dir():
            return True
        return "/" in model and isinstance(try_to_load_from_cache(model, "config.json"), str)

    def transfer(self, connection: Mapping[str, object], num_bytes: int) -> tuple[float, float]:
        """Bytes per second of a put and of a get of one object through Mooncake, which is removed again."""
        from dspark_lab.store.mooncake_client import MooncakeClient

        client = MooncakeClient(**connection)  # pyright: ignore[reportArgumentType]
        name = f"dspark_lab-doctor-{os.uname().nodename}-{os.getpid()}"
        try:
            data = client.take(num_bytes)
            data.copy_(torch.arange(num_bytes // 8).view(torch.uint8))
            started = time.perf_counter()
            client.put([name], [data])
            put_s = time.perf_counter() - started
            back = client.take(num_bytes)
            started = time.perf_counter()
            client.get_into([name], [back])
            get_s = time.perf_counter() - started
            if not torch.equal(back, data):
                raise OSError("what came back is not what was sent")
            return num_bytes / put_s, num_bytes / get_s
        finally:
            client.remove([name])
            client.close()
