"""The services of a run: started when needed, with what each is to know, and gone with it. Mooncake is real."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stand_in_vllm
from hydra import compose, initialize_config_dir
from test_services import eventually, listens, lives, needs_mooncake, start_parent

from dspark_lab.cluster.local import EngineRecipe, LocalCluster, MooncakeRecipe
from dspark_lab.cluster.services import Service, ServiceError
from dspark_lab.configs import config_folder
from dspark_lab.nearby import answers
from dspark_lab.pipeline.build import build
from dspark_lab.store.mooncake_connection import MooncakeConnection

pytestmark = needs_mooncake
PREFIX = (sys.executable, stand_in_vllm.__file__)
ASKED: dict[str, Any] = {"dtype": "bfloat16", "max_tokens": 64, "payload_folder": None}


def local_cluster(folder: Path, **engine: Any) -> LocalCluster:
    recipe = {
        "python": None,
        "command_prefix": PREFIX,
        "arguments": ("--more",),
        "visible_devices": "3",
        "num_restarts": 1,
        "deadline_s": 60,
    }
    return LocalCluster(
        folder=folder,
        num_training_devices=0,
        mooncake=MooncakeConnection(
            master_address=None, admin_url=None, protocol="tcp", rdma_devices="mlx5_0", local_hostname="127.0.0.1"
        ),
        storage=MooncakeRecipe(python=None, command_prefix=(), segment_bytes=2**26, lease_s=60.0),
        vllm=EngineRecipe(**{**recipe, **engine}),
    )


def address(url: str) -> str:
    return url.removeprefix("http://")


def test_each_service_starts_when_it_is_needed(tmp_path: Path) -> None:
    cluster = local_cluster(tmp_path)
    assert not list(tmp_path.iterdir())
    (answering,) = cluster.engine(Path("/m"), layer_ids=(), **ASKED)
    assert answers(f"{answering}/health") and [path.name for path in tmp_path.iterdir()] == ["vllm.log"]
    assert cluster.engine(Path("/m"), layer_ids=(), **ASKED) == [answering]
    (capturing,) = cluster.engine(Path("/m"), layer_ids=(1, 4), **ASKED)
    assert not listens(address(answering)) and listens(address(capturing))
    connection = cluster.mooncake()
    assert connection.master_address and connection.admin_url and answers(f"{connection.admin_url}/health")
    cluster.check()
    cluster.stop_engine()
    assert not listens(address(capturing)) and listens(connection.master_address)
    cluster.close()
    assert not listens(connection.master_address)
    cluster.close()


def test_the_connector_is_told_the_connection(tmp_path: Path) -> None:
    cluster = local_cluster(tmp_path)
    try:
        cluster.engine(Path("/m"), layer_ids=(1, 4), **ASKED)
        first = (tmp_path / "vllm.log").read_text()
        connection = cluster.mooncake()
        told = (
            f'"master_server_address": "{connection.master_address}"',
            '"protocol": "tcp"',
            '"device_name": "mlx5_0"',
            '"local_hostname": "127.0.0.1"',
            '"eagle_aux_hidden_state_layer_ids": [1, 4]',
            "--model /m",
            "--no-enable-prefix-caching",
            "--dtype bfloat16 --max-model-len 64 --generation-config vllm --more",
        )
        assert all(text in first for text in told)
        assert connection.of_client == {
            "master_address": connection.master_address,
            "protocol": "tcp",
            "rdma_devices": "mlx5_0",
            "local_hostname": "127.0.0.1",
        }
        cluster.engine(Path("/m"), layer_ids=(), **ASKED)
        assert "--kv-transfer-config" not in (tmp_path / "vllm.log").read_text().removeprefix(first)
    finally:
        cluster.close()


def test_a_server_that_does_not_start_tells_why(tmp_path: Path) -> None:
    cluster = local_cluster(tmp_path, command_prefix=(), python="/no/such/python")
    with pytest.raises(ServiceError, match=r"No such file.*'/no/such/python'"):
        cluster.engine(Path("/m"), layer_ids=(), **ASKED)
    cluster.close()


def test_a_server_that_ends_by_itself_is_started_again_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = local_cluster(tmp_path)
    try:
        (url,) = cluster.engine(Path("/m"), layer_ids=(), **ASKED)

        def alive() -> bool:
            cluster.check()
            return listens(address(url))

        assert cluster._server
        first = cluster._server._process.pid
        kill(cluster._server)
        assert eventually(lambda: alive() and cluster._server is not None and cluster._server._process.pid != first)
        printed = capsys.readouterr().out
        assert "vllm has ended with status 137" in printed and "Last lines of" in printed
        assert "starting it again, 1 of 1 times" in printed
        kill(cluster._server)  # once too often
        assert eventually(lambda: raises(cluster.check, r"vllm has ended with status 137.*Last lines of"))
    finally:
        cluster.close()


def test_states_through_files_need_no_mooncake(tmp_path: Path) -> None:
    cluster = local_cluster(tmp_path / "logs")
    try:
        cluster.engine(Path("/m"), layer_ids=(1, 4), **{**ASKED, "payload_folder": tmp_path / "payloads"})
        told = (tmp_path / "logs" / "vllm.log").read_text()
        assert f'"shared_storage_path": "{tmp_path / "payloads"}"' in told and "DiskHiddenStatesConnector" in told
        assert [path.name for path in (tmp_path / "logs").iterdir()] == ["vllm.log"]
    finally:
        cluster.close()


def test_training_and_engine_share_the_accelerators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)

    def of_children(*, num_training_devices: int, visible_devices: str | None = None) -> list[str | None]:
        cluster = local_cluster(tmp_path, visible_devices=visible_devices)
        cluster.num_training_devices = num_training_devices
        both = cluster.training_environment, cluster._engine_devices()
        return [environment.get("CUDA_VISIBLE_DEVICES") for environment in both]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert of_children(num_training_devices=3) == ["0,1,2", "3"]
    assert of_children(num_training_devices=0) == [None, "0,1,2,3"]  # one after the other
    assert of_children(num_training_devices=3, visible_devices="2,3") == ["0,1,2", "2,3"]
    with pytest.raises(
        ValueError, match=r"training takes 4 accelerators \(trainer\.devices\) of 0, 1, 2, 3.*none is left"
    ):
        of_children(num_training_devices=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5,6,7")
    assert of_children(num_training_devices=1) == ["4", "GPU-5,6,7"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert of_children(num_training_devices=1) == [None, None]


def raises(call: Callable[[], None], says: str) -> bool:
    try:
        call()
    except ServiceError as error:
        return re.search(says, str(error)) is not None
    return False


def kill(service: Service) -> None:
    """SIGKILL to the server itself; its watcher lives on."""
    watcher = service._process.pid
    (server,) = Path(f"/proc/{watcher}/task/{watcher}/children").read_text().split()
    os.kill(int(server), signal.SIGKILL)


def test_it_is_built_from_its_config(tmp_path: Path) -> None:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", ["cluster=local", "cluster.vllm.python=/opt/vllm/bin/python"])
    cluster: LocalCluster = build(config, "cluster", folder=tmp_path, num_training_devices=0)
    assert cluster.vllm.role.python == "/opt/vllm/bin/python" and cluster.storage.role.python == sys.executable
    with pytest.raises(ValueError, match=r"cluster\.storage\.segment_bytes"):
        config.cluster.storage.segment_bytes = "much"
        build(config, "cluster", folder=tmp_path, num_training_devices=0)


@pytest.mark.slow
def test_no_orphan_of_the_whole_set_after_sigkill(tmp_path: Path) -> None:
    parent, told = start_parent("cluster", tmp_path)
    addresses, pids = told[:2], [int(pid) for pid in told[2:]]
    assert all(map(listens, addresses)) and len(pids) == 3 and all(map(lives, pids))
    with parent:
        os.kill(parent.pid, signal.SIGKILL)
    assert eventually(lambda: not any(map(listens, addresses)) and not any(map(lives, pids)))
