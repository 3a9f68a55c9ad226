"""States of the tiny target from a real vLLM through a real Mooncake are those of Transformers."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_lab.capture.client import CaptureClient
from dspark_lab.capture.endpoint import Endpoint
from dspark_lab.capture.payloads import MooncakePayloads
from dspark_lab.capture.protocol import CaptureError, EngineUnreachableError
from dspark_lab.cluster.services import MooncakeMaster, MooncakeSegment
from dspark_lab.cluster.vllm import VllmServer, capture_arguments, through_mooncake
from dspark_lab.records import TokenizedConversation
from dspark_lab.report.metrics_log import curve, read_metrics
from dspark_lab.report.results import read_results
from dspark_lab.store.mooncake_admin import object_names
from dspark_lab.store.protocol import Manifest

try:
    import hs_connectors.mooncake_store
    import vllm
    from mooncake.store import MooncakeDistributedStore

    from dspark_lab.store.mooncake_client import MooncakeClient
except ImportError:
    vllm = None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.mooncake,
    pytest.mark.skipif(vllm is None, reason="vllm, hs-connectors or mooncake is not installed: make test-services"),
]
MODEL = str(files("dspark_lab") / "assets" / "tiny")
POISON = 3  # <|mask|>, in no prompt but one
LAYER_IDS = (1, 2, 3)
NUM_LAYERS = 4
MANIFEST = Manifest(
    "tiny", revision="r", fingerprint="f", template_hash="t", layer_ids=LAYER_IDS, hidden_size=128, engine="vllm"
)


def poisoned_target(folder: Path) -> str:
    """The tiny target, but that the embedding of ``POISON`` is NaN; its head, else the same matrix, is one of its own."""
    shutil.copytree(MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.clone()
    embedding[POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return str(folder)


class Engine:
    """vLLM that captures, a master and a segment; ``client`` is connected to them."""

    def __init__(self, folder: Path, master: MooncakeMaster) -> None:
        self.folder, self.master, self.model = folder, master, poisoned_target(folder / "target")
        self.client = MooncakeClient(
            master_address=master.address, protocol="tcp", rdma_devices="", local_hostname="127.0.0.1"
        )
        connection = {
            "local_hostname": "127.0.0.1",
            "master_server_address": self.master.address,
            "global_segment_size": 0,
            "local_buffer_size": 2**24,
        }
        capturing = capture_arguments((*LAYER_IDS, NUM_LAYERS), transfer=through_mooncake(connection))
        # Long prompts are computed in chunks, and short ones together.
        arguments = (*capturing, "--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-batched-tokens", "256")
        self.server = VllmServer(folder=self.folder, model=self.model, arguments=arguments, on_cpu=True)

    def capturing(self, **settings: Any) -> CaptureClient:
        chosen = {
            "namespace": "run", "generation": None, "endpoints": Endpoint(self.server.url, self.model), "manifest": MANIFEST,
        }  # fmt: skip
        payloads = MooncakePayloads(self.client, admin_url=self.master.admin_url)
        return CaptureClient(
            payloads, **{**chosen, "concurrency": 4, "timeout_s": 60.0, "payload_timeout_s": 60.0, **settings}
        )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("services")
    with MooncakeMaster(folder=folder) as master, MooncakeSegment(master, folder=folder, num_bytes=2**28):
        made = Engine(folder, master)
        yield made
        made.server.stop()


def conversations(number: int) -> list[TokenizedConversation]:
    lengths = [1, 2, 127, 128, 129, 300, 17, 40][:number]  # vLLM's blocks have 128 tokens here
    ids = [torch.randint(POISON + 1, 400, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    return [TokenizedConversation(f"c{len(i)}", i, torch.arange(len(i)) % 2 == 0) for i in ids]


def test_states_are_those_of_transformers(engine: Engine) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    asked = {conversation.key: conversation for conversation in conversations(8)}
    got = dict(engine.capturing().capture(list(asked.values())))
    assert got.keys() == asked.keys()
    for key, sample in got.items():
        assert sample.hidden_states.dtype == torch.bfloat16
        with torch.no_grad():
            states = model.model(asked[key].token_ids[None], output_hidden_states=True).hidden_states
            # Transformers' last entry is normed already: compare behind the norm.
            last = model.model.norm(sample.last_hidden_state.float())
        for row, layer in enumerate(LAYER_IDS):
            assert relative_error(sample.hidden_states[:, row].float(), states[layer][0]) < 0.02, (
                len(asked[key]),
                layer,
            )
        assert relative_error(last, states[NUM_LAYERS][0]) < 0.03
        # States of the neighbouring position are ten times as far off as rounding.
        if len(asked[key]) > 2:
            assert relative_error(sample.hidden_states[1:, 0].float(), states[1][0][:-1]) > 0.2


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_a_request_whose_states_are_not_finite_is_refused_and_its_server_goes_on(engine: Engine) -> None:
    """Together with sound ones, and in front of those that are given its blocks of the engine's cache."""
    client = engine.capturing()
    sound = conversations(8)
    before = dict(client.capture(sound))
    ids = sound[5].token_ids.clone()
    ids[[7, 200]] = POISON
    poisoned = TokenizedConversation("poisoned", ids, sound[5].loss_mask)
    with ThreadPoolExecutor(2) as pool:
        described, beside = pool.map(client.submit, (poisoned, sound[4]))
    with pytest.raises(
        CaptureError, match=rf"{described['handle']}: .*Non-finite producer tensor 'hidden_states'"
    ) as caught:
        client.take(poisoned, described)
    assert caught.value.reason == "non_finite" and client.generation in described["handle"]
    found = {**dict(client.capture(sound)), "beside": client.take(sound[4], beside)}
    before["beside"] = before[sound[4].key]
    for key, sample in before.items():
        assert relative_error(found[key].hidden_states.float(), sample.hidden_states.float()) < 0.02
        assert relative_error(found[key].last_hidden_state.float(), sample.last_hidden_state.float()) < 0.02
    assert object_names(engine.master.admin_url, prefix="") == []


def test_nothing_stays_in_mooncake(engine: Engine) -> None:
    assert len(list(engine.capturing().capture(conversations(5)))) == 5
    assert object_names(engine.master.admin_url, prefix="") == []


def test_a_restarted_run_removes_what_the_killed_one_left(engine: Engine) -> None:
    killed, other = engine.capturing(), engine.capturing(namespace="run-2")
    (conversation,) = conversations(1)
    left, kept = killed.submit(conversation), other.submit(conversation)
    for client, described in ((killed, left), (other, kept)):
        while not client.ready(described):
            time.sleep(0.01)
    assert engine.capturing(generation=killed.generation).remove_orphans() == 0  # another rank
    assert engine.capturing().remove_orphans() == 1
    assert object_names(engine.master.admin_url, prefix="") == [kept["handle"]]
    assert other.remove_orphans() == 0  # its own
    other.take(conversation, kept)
    assert object_names(engine.master.admin_url, prefix="") == []
    with pytest.raises(ValueError, match="namespace='a b'"):
        engine.capturing(namespace="a b")


def test_a_payload_that_comes_after_it_was_given_up_is_removed(engine: Engine) -> None:
    client, another = engine.capturing(), engine.capturing()
    (conversation,) = conversations(1)
    given_up, wanted, theirs = client.submit(conversation), client.submit(conversation), another.submit(conversation)
    client.remove([given_up])
    for source, described in ((client, wanted), (another, theirs)):
        while not source.ready(described):
            time.sleep(0.01)
    while given_up["handle"] in object_names(engine.master.admin_url, prefix=""):
        client.remove_strays()
    assert sorted(object_names(engine.master.admin_url, prefix="")) == sorted([wanted["handle"], theirs["handle"]])
    client.remove([wanted])
    another.remove([theirs])


def test_payloads_withstand_eviction(engine: Engine) -> None:
    """Mooncake evicts the oldest at 90 %; a payload that no one has read yet is not among them."""
    client = engine.capturing()
    (conversation,) = conversations(1)
    described = client.submit(conversation)
    while not object_names(
        engine.master.admin_url, prefix=described["handle"]
    ):  # asking Mooncake itself would lease it
        time.sleep(0.05)
    stranger = MooncakeDistributedStore()
    assert stranger.setup("127.0.0.1", "P2PHANDSHAKE", 0, 2**26, "tcp", "", engine.master.address) == 0
    fillers = [f"filler{number}" for number in range(40)]
    for name in fillers:
        stranger.put(name, bytes(2**23))
    there = [name for name in fillers if stranger.is_exist(name) == 1]
    assert 0 < len(there) < len(fillers)
    assert len(client.take(conversation, described).token_ids) == len(conversation)
    assert stranger.remove_by_regex("^filler", True) == len(there)


def test_a_stock_consumer_reads_what_our_connector_writes(engine: Engine) -> None:
    store = hs_connectors.mooncake_store.MooncakeHiddenStatesStore(
        hs_connectors.mooncake_store.MooncakeStoreConfig(
            local_hostname="127.0.0.1", master_server_address=engine.master.address, global_segment_size=0,
            local_buffer_size=2**24,
        )
    ).setup()  # fmt: skip
    (conversation,) = conversations(3)[2:]
    described = engine.capturing().submit(conversation)
    assert described["layer_ids"] == [*LAYER_IDS, NUM_LAYERS]
    theirs = store.get_sample(dict(described), timeout=60)
    ours = engine.capturing().take(conversation, described)
    assert torch.equal(theirs["hidden_states"][:, :-1], ours.hidden_states)
    assert torch.equal(theirs["token_ids"], conversation.token_ids)


def test_a_model_that_the_server_does_not_have(engine: Engine) -> None:
    client = engine.capturing(endpoints=Endpoint(engine.server.url, "another"))
    with pytest.raises(CaptureError, match=r"refused /v1/completions: HTTP Error 404.*another"):
        list(client.capture(conversations(1)))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"manifest": replace(MANIFEST, layer_ids=(1, 2))}, r"captured \[\[1, 4, 128\].*wanted were \[\[1, 3, 128\]"),
        ({"manifest": replace(MANIFEST, dtype="float32")}, "start it with this run's layer ids and --dtype"),
        ({"endpoints": Endpoint("http://127.0.0.1:9", MODEL)}, r"http://127\.0\.0\.1:9: .*Connection refused"),
    ],
)
def test_what_was_not_asked_for_is_refused(engine: Engine, settings: dict[str, Any], says: str) -> None:
    with pytest.raises((CaptureError, EngineUnreachableError), match=says):
        list(engine.capturing(**settings).capture(conversations(1)))


def test_a_damaged_payload_is_refused(engine: Engine) -> None:
    """The engine's payload under another description: other ids, fewer bytes, another form, nothing, a failed producer; or
    with a bit flipped."""
    client = engine.capturing(payload_timeout_s=1.0)
    asked, other = conversations(8)[6:]

    def described() -> dict[str, Any]:
        return json.loads(json.dumps(engine.capturing().submit(asked)))

    def refused(says: str, reason: str, answer: Callable[[], Any]) -> None:
        with pytest.raises(CaptureError, match=says) as caught:
            answer()
        assert caught.value.reason == reason

    def told(conversation: TokenizedConversation, description: dict[str, Any]) -> Callable[[], Any]:
        """The server's reply to ``conversation`` holds ``description``."""
        liar = engine.capturing()
        liar._post = lambda conversation, owner: {"kv_transfer_params": description}
        return lambda: liar.submit(conversation)

    swapped = replace(asked, token_ids=asked.token_ids.flip(0))
    refused("other token ids than were sent", "token_ids", lambda: client.take(swapped, described()))
    short = described()
    short["metadata"]["total_aligned_bytes"] += 64
    refused("bytes arrived of", "truncated", lambda: client.take(asked, short))
    flipped = described()
    while not client.ready(flipped):
        time.sleep(0.01)
    payload = engine.client.take(engine.client.size(flipped["handle"]))
    engine.client.get_into([flipped["handle"]], [payload])
    payload[8] ^= 1  # of a mantissa
    engine.client.remove([flipped["handle"]])
    engine.client.put([flipped["handle"]], [payload])
    refused("its checksum differs", "corrupt", lambda: client.take(asked, flipped))
    nowhere = described() | {"handle": "nowhere"}
    refused("no payload after 1 s", "no_payload", lambda: client.take(asked, nowhere))
    failed = engine.client.take(64)
    failed[:] = torch.frombuffer(bytearray(b'{"error": "Non-finite"}'.ljust(64)), dtype=torch.uint8)
    engine.client.put(["broken:error"], [failed])
    broken = described() | {"handle": "broken"}
    refused(r"connector failed.*Non-finite", "non_finite", lambda: client.take(asked, broken))
    refused("have version 2, this code reads 1", "description", told(asked, described() | {"version": 2}))
    refused("the engine captured", "description", told(other, described()))
    refused("not of the wire format", "description", told(asked, {"version": 1, "handle": "garbage"}))
    beyond = described()
    beyond["tensors"]["token_ids"]["offset"] += 2**20
    refused("the engine captured", "description", told(asked, beyond))
    smaller = described()
    smaller["tensors"]["hidden_states"]["nbytes"] //= 2
    refused("not of the wire format", "description", told(asked, smaller))
    engine.capturing().remove_orphans()


class Lab:
    """Live runs of the smoke experiment, with one cache."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder, self.engine = folder, engine

    def start(self, name: str, *overrides: str) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "dspark_lab", "+experiment=smoke", f"run.root={self.folder / 'runs'}"),
            *("data.train.num_prompts=60", "data.validation.num_prompts=8", "benchmark.prompts.num_prompts=8"),
            *(f"run.name={name}", "trainer.log_every_steps=1", *overrides),
        ]
        environment = {**os.environ, "DSPARK_LAB_HOME": str(self.folder / "home"), "COLUMNS": "120"}
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    @property
    def live(self) -> Sequence[str]:
        return (
            *(
                "engine=vllm",
                f"engine.endpoints=[{self.engine.server.url}]",
                "engine.concurrency=8",
                "engine.payload_timeout_s=10",
            ),
            *("data.source=live", "data.num_workers=0", "store=mooncake"),
            f"cluster.mooncake.master_address={self.engine.master.address}",
            f"cluster.mooncake.admin_url={self.engine.master.admin_url}",
        )

    def finish(self, process: subprocess.Popen[bytes], name: str) -> None:
        assert process.wait(300) == 0, (self.folder / f"{name}.log").read_text()[-4000:]

    def call(self, name: str, *overrides: str) -> None:
        self.finish(self.start(name, *overrides), name)

    @property
    def payloads(self) -> list[str]:
        """What runs have left in Mooncake; the other tests' client calls itself "run"."""
        names = object_names(self.engine.master.admin_url, prefix="cmpl-run-")
        return [name for name in names if not name.startswith("cmpl-run--")]

    def logged(self, name: str, what: str) -> list[float]:
        run = self.folder / "runs" / name
        found = curve(read_metrics(run), what) if run.joinpath("metrics.jsonl").exists() else None
        return [] if found is None else list(found.value)

    def events(self, name: str) -> dict[str, int]:
        stages = read_results(self.folder / "runs" / name).stages
        return dict(next(stage.events for stage in stages if stage.name == "train"))


@pytest.fixture(scope="module")
def lab(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """With one run done: "live", of which everything is kept."""
    made = Lab(tmp_path_factory.mktemp("lab"), engine)
    made.call("answers", "stages=regenerate")  # by a target in process: capturing servers answer no prompts
    made.call("live", *made.live, "stages=[capture,train]", "store.keep=disk")
    return made


def test_training_live_is_the_run_from_the_store_that_the_same_engine_filled(lab: Lab) -> None:
    lab.call("kept", *lab.live, "stages=train", "store.keep=disk")
    assert lab.logged("live", "train/loss") == lab.logged("kept", "train/loss")
    assert len(lab.logged("kept", "train/loss")) == 40
    assert lab.events("live").keys() == {"live samples generated", "live samples used", "live samples reused"}
    assert lab.events("kept").keys() == {"live samples used", "live samples reused"}
    assert lab.payloads == []


def test_two_ranks_train_live(lab: Lab) -> None:
    two = ("trainer.devices=2", "data.rows_per_batch=1", "stages=[capture,train]")
    lab.call("two", *lab.live, *two)
    assert lab.logged("two", "tokens")[:5] == lab.logged("live", "tokens")[:5]  # the sixth step repeats a row
    assert lab.logged("two", "train/loss") == pytest.approx(lab.logged("live", "train/loss"), rel=0.05)
    assert lab.payloads == []
