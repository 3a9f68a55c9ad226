"""States in files: what our connector writes is vLLM's format, and the client survives whatever it finds."""

import fcntl
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_states import CONVERSATION, MANIFEST, STATES
from safetensors.torch import save_file

from dspark_lab.capture.checksum import CRC32, crc32_of
from dspark_lab.capture.client import CaptureClient
from dspark_lab.capture.payloads import FilePayloads
from dspark_lab.capture.protocol import CaptureError


class Writer:
    """In the place of a server: writes ``tensors`` into a file, or as many bytes of it as ``num_bytes``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = {"hidden_states": STATES, "token_ids": CONVERSATION.token_ids}
        self.num_bytes: int | None = None
        self.num_lost = 0  # of the next payloads
        self.num_flipped = 0  # of them; a bit of each, of what our connector would have written
        self.num_asked = 0
        self.told: dict[str, Any] = {}  # further, in its replies

    def post(self, path: str, body: Any, *, timeout_s: float, headers: Any = None) -> Any:
        self.num_asked += 1
        file = self.folder / f"cmpl-{headers['X-Request-Id']}-0-{self.num_asked}.safetensors"
        file.with_name(file.name + ".lock").touch()
        save_file(self.tensors, file)
        file.write_bytes(file.read_bytes()[: self.num_bytes])
        if self.num_asked <= self.num_flipped:
            save_file(self.tensors, file, {CRC32: crc32_of(STATES, CONVERSATION.token_ids)})
            payload = bytearray(file.read_bytes())
            payload[-2] ^= 1  # of a mantissa
            file.write_bytes(payload)
        if self.num_asked <= self.num_lost:
            file.unlink()
        return {"kv_transfer_params": {"hidden_states_path": f"/as/the/server/sees/it/{file.name}", **self.told}}


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


def client_of(writer: Writer, **settings: Any) -> CaptureClient:
    given = {"generation": None, "concurrency": 2, "timeout_s": 5.0, "payload_timeout_s": 0.2, **settings}
    return CaptureClient(FilePayloads(writer.folder), namespace="run", endpoints=writer, manifest=MANIFEST, **given)


def test_a_sample_comes_through_a_file_and_leaves_nothing(writer: Writer) -> None:
    ((key, sample),) = client_of(writer).capture([CONVERSATION])
    assert key == CONVERSATION.key and torch.equal(sample.token_ids, CONVERSATION.token_ids)
    assert torch.equal(sample.hidden_states, STATES[:, :2]) and torch.equal(sample.last_hidden_state, STATES[:, 2])
    assert not list(writer.folder.iterdir())


def test_a_payload_that_its_server_died_of_is_asked_for_once_more(writer: Writer) -> None:
    writer.num_lost = 1
    ((key, _),) = client_of(writer).capture([CONVERSATION])
    assert key == CONVERSATION.key and writer.num_asked == 2 and not list(writer.folder.iterdir())
    writer.num_lost = 4
    with pytest.raises(CaptureError, match="the engine has ended, or failed, without writing it"):
        list(client_of(writer).capture([CONVERSATION]))
    assert writer.num_asked == 4


def test_a_payload_that_was_changed_under_way_is_asked_for_once_more(writer: Writer) -> None:
    writer.num_flipped = 1
    ((_, sample),) = client_of(writer).capture([CONVERSATION])
    assert torch.equal(sample.hidden_states, STATES[:, :2]) and writer.num_asked == 2
    writer.num_flipped = 4
    with pytest.raises(CaptureError, match=r"cmpl-run.*bytes were changed under way") as caught:
        list(client_of(writer).capture([CONVERSATION]))
    assert caught.value.reason == "corrupt" and writer.num_asked == 4 and not list(writer.folder.iterdir())


def test_what_another_generation_left_is_removed(writer: Writer) -> None:
    killed = client_of(writer)
    killed.submit(CONVERSATION)
    (writer.folder / "another's.safetensors").touch()
    assert client_of(writer, generation=killed.generation).remove_orphans() == 0
    assert client_of(writer).remove_orphans() == 1
    assert [path.name for path in writer.folder.iterdir()] == ["another's.safetensors"]


def test_a_payload_that_is_not_what_was_asked_for_is_refused(writer: Writer) -> None:
    def refused(reason: str, says: str) -> None:
        with pytest.raises(CaptureError, match=says) as caught:
            list(client_of(writer).capture([CONVERSATION]))
        assert caught.value.reason == reason and not list(writer.folder.iterdir())

    sound = writer.tensors
    writer.num_bytes = 300
    refused("truncated", r"cmpl-run.*not a whole payload")
    writer.num_bytes = None
    writer.tensors = {**sound, "hidden_states": STATES[:, :2].contiguous()}
    refused("description", r"captured \[\[37, 2, 8\].*wanted were \[\[37, 3, 8\]")
    writer.tensors = {**sound, "token_ids": CONVERSATION.token_ids + 1}
    refused("token_ids", "other token ids than were sent")


def test_states_of_other_layers_are_refused_where_the_server_tells_them(writer: Writer) -> None:
    writer.told = {"layer_ids": [1, 2, 4]}
    assert len(list(client_of(writer).capture([CONVERSATION]))) == 1
    writer.told = {"layer_ids": [1, 3, 4]}
    with pytest.raises(CaptureError, match=r"entering layers \[1, 3, 4\], wanted were \[1, 2\] and the last"):
        client_of(writer).submit(CONVERSATION)


def test_a_locked_payload_is_waited_for(writer: Writer) -> None:
    client = client_of(writer)
    described = client.submit(CONVERSATION)
    (lock,) = writer.folder.glob("*.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not client.ready(described)
        with pytest.raises(CaptureError, match=r"no payload after 0\.2 s"):
            client.take(CONVERSATION, described)
    assert not list(writer.folder.iterdir())
    with pytest.raises(CaptureError, match="names no file"):
        client.payloads.check(CONVERSATION, {"handle": "h", "version": 1}, MANIFEST)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: make test-services")
def test_the_connector_without_its_engine(tmp_path: Path) -> None:
    """What it writes is read by vLLM and by us, and requests that fail have markers; its engine is in
    ``tests/integration/test_engine_vllm.py``."""
    script = Path(__file__).with_name("connector_alone.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    payloads = FilePayloads(tmp_path / "payloads")
    sound, spoilt = ({"hidden_states_path": f"/there/{name}.safetensors"} for name in ("cmpl-sound", "cmpl-spoilt"))
    assert payloads.ready(sound)
    captured = payloads.read(sound)
    # Blocks 2 and 0 of four slots each, two layers and eight numbers, counted in the cache's order.
    cache = torch.arange(3 * 2 * 4 * 8).view(3, 2, 4, 8).transpose(1, 2)
    assert torch.equal(captured.states, torch.cat([cache[2], cache[0]])[:6].bfloat16())
    assert captured.token_ids.tolist() == list(range(6))
    with pytest.raises(CaptureError, match=r"cmpl-spoilt\.safetensors: .*connector failed: Non-finite") as caught:
        payloads.ready(spoilt)
    assert caught.value.reason == "non_finite"
    assert payloads.names("cmpl-") == ["cmpl-sound", "cmpl-spoilt"]
    payloads.remove(payloads.names("cmpl-"))
    assert not list(payloads.folder.iterdir())
