import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import parent_of_services
import pytest

from dspark_lab.cluster.services import MooncakeMaster, Role, Service, ServiceError
from dspark_lab.nearby import LOOPBACK, answers, free_port

try:
    import mooncake  # pyright: ignore[reportMissingImports]
except ImportError:
    mooncake = None
needs_mooncake = [
    pytest.mark.mooncake,
    pytest.mark.skipif(mooncake is None, reason="mooncake is not installed: make test-services"),
]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def lives(pid: int) -> bool:
    try:
        # A zombie that no one has reaped is dead.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(happened: Callable[[], bool], *, within_s: float = 20) -> bool:
    deadline = time.monotonic() + within_s
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def listens(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_ready_then_stopped(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", LOOPBACK, "--directory", str(tmp_path)]
    with Service("web", command, folder=tmp_path / "logs") as service:
        service.wait_ready(lambda: answers(f"http://{LOOPBACK}:{port}/"), deadline_s=20)
        service.check()
    assert not listens(f"{LOOPBACK}:{port}")
    assert "GET / HTTP" in (tmp_path / "logs" / "web.log").read_text()
    with pytest.raises(ServiceError, match="web has ended"):
        service.check()
    service.stop()


def test_a_service_that_fails_tells_the_tail_of_its_log(tmp_path: Path) -> None:
    code = "import sys; print('\\n'.join(f'line {i}' for i in range(100))); sys.exit('no such device')"
    service = Service("engine", python(code), folder=tmp_path)
    with pytest.raises(ServiceError, match=r"engine has ended with status 1\..*engine\.log:(.|\n)*no such device") as e:
        service.wait_ready(lambda: False, deadline_s=20)
    assert "line 99" in str(e.value) and "line 50" not in str(e.value)


def test_a_service_killed_by_a_signal_says_so_as_a_shell_does(tmp_path: Path) -> None:
    service = Service("engine", python("import os; os.kill(os.getpid(), 9)"), folder=tmp_path)
    with pytest.raises(ServiceError, match="status 137"):
        service.wait_ready(lambda: False, deadline_s=20)


def test_a_service_that_never_gets_ready_is_stopped(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    service = Service("engine", python(code), folder=tmp_path)
    with pytest.raises(ServiceError, match=r"engine was not ready after 1\.5 s"):
        service.wait_ready(lambda: False, deadline_s=1.5)
    assert not lives(int(service.log.read_text()))


def test_helpers_of_a_service_end_with_it(tmp_path: Path) -> None:
    with Service("server", python(parent_of_services.SERVER), folder=tmp_path) as service:
        service.wait_ready(lambda: len(service.log.read_text().split()) == 2, deadline_s=20)
        pids = [int(pid) for pid in service.log.read_text().split()]
        assert all(map(lives, pids))
    assert eventually(lambda: not any(map(lives, pids)))


def test_a_secret_is_in_no_command_line_and_no_log(tmp_path: Path) -> None:
    code = (
        "import os, time; assert os.environ['TOKEN'][::-1] == 'hsuh'; print(os.getpid(), flush=True); time.sleep(600)"
    )
    with Service("engine", python(code), folder=tmp_path, environment={"TOKEN": "hush"}) as service:
        service.wait_ready(lambda: service.log.read_text() != "", deadline_s=20)
        everyone = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if lives(int(p.parent.name))]
        assert any(b"TOKEN" in command for command in everyone)
        assert not any(b"hush" in command for command in everyone)
        assert "hush" not in service.log.read_text()


def test_role() -> None:
    role = Role(python="/opt/engine/bin/python", command_prefix=("docker", "run", "image"))
    assert role.command("-m", "vllm") == ["docker", "run", "image", "/opt/engine/bin/python", "-m", "vllm"]


def start_parent(kind: str, folder: Path) -> tuple[subprocess.Popen, list[str]]:
    parent = subprocess.Popen(
        [sys.executable, parent_of_services.__file__, kind, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout
    told = parent.stdout.readline().split()
    assert told[0] == "ready"
    return parent, told[1:]


@pytest.mark.parametrize("whole_group", [False, True], ids=["the parent", "its process group"])
def test_no_orphan_after_sigkill(tmp_path: Path, whole_group: bool) -> None:
    parent, told = start_parent("server", tmp_path)
    pids = [int(pid) for pid in told]
    assert all(map(lives, pids))
    with parent:
        (os.killpg if whole_group else os.kill)(parent.pid, signal.SIGKILL)
    # The helper ignores SIGTERM, so its end takes the grace period at most.
    assert eventually(lambda: not any(map(lives, pids)))


class TestMooncakeMaster:
    pytestmark = needs_mooncake

    def test_bound_to_loopback_alone(self, tmp_path: Path) -> None:
        with MooncakeMaster(folder=tmp_path) as master:
            assert master.address.startswith("127.0.0.1:") and listens(master.address)
            sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            listening = {line[1] for line in sockets if line[3] == "0A"}
            for port in (master.port, master.admin_port):
                assert {entry for entry in listening if entry.endswith(f":{port:04X}")} == {f"0100007F:{port:04X}"}
        assert not listens(master.address)

    def test_two_do_not_meet(self, tmp_path: Path) -> None:
        with MooncakeMaster(folder=tmp_path / "a") as a, MooncakeMaster(folder=tmp_path / "b") as b:
            assert a.address != b.address and listens(a.address) and listens(b.address)

    def test_a_taken_port_is_left_for_another(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as taken:
            taken.bind((LOOPBACK, 0))
            taken.listen()
            ports = iter([free_port(), taken.getsockname()[1], free_port(), free_port()])
            monkeypatch.setattr("dspark_lab.cluster.services.free_port", lambda host: next(ports))
            with MooncakeMaster(folder=tmp_path) as master:
                assert listens(master.address)

    def test_no_orphan_after_sigkill(self, tmp_path: Path) -> None:
        parent, (address,) = start_parent("mooncake_master", tmp_path)
        assert listens(address)
        with parent:
            parent.kill()
        assert eventually(lambda: not listens(address))

    def test_a_wrong_python_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ServiceError, match=r"No such file.*'/no/such/python'"):
            MooncakeMaster(folder=tmp_path, role=Role(python="/no/such/python"))
