"""A hybrid target in a real vLLM: its states, behind linear attention and experts, are those of Transformers."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dspark_lab.capture.client import CaptureClient
from dspark_lab.capture.endpoints import Endpoint
from dspark_lab.capture.payloads import FilePayloads
from dspark_lab.cluster.vllm import VllmServer, capture_arguments, through_files
from dspark_lab.records import TokenizedConversation
from dspark_lab.store.protocol import Manifest
from dspark_lab.target.huggingface import HuggingFaceTarget

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: make test-services"),
]


def test_states_of_a_hybrid_target_are_those_of_transformers(tmp_path: Path) -> None:
    """In bf16, which alone vLLM's CPU kernels of linear attention take; prompts of several lengths, one in two chunks.

    Transformers in bf16 is as far from itself in fp32: by 0.02 in the first state, 0.03 to 0.04 in the last.
    """
    target = HuggingFaceTarget(
        name="tiny_hybrid", model="tiny_hybrid", home=tmp_path, layer_ids=(1, 2, 3), mask_token_id=3, dtype="float32"
    )
    manifest = Manifest.for_target(target.spec, engine="vllm", dtype="bfloat16")
    ids = [torch.randint(3, 400, (n,), generator=torch.Generator().manual_seed(n)) for n in (2, 40, 127, 130, 300)]
    asked = [TokenizedConversation(f"c{len(i)}", i, torch.ones(len(i), dtype=torch.bool)) for i in ids]
    arguments = [
        *capture_arguments((1, 2, 3, 4), transfer=through_files(tmp_path / "payloads")),
        *("--dtype", "bfloat16", "--max-model-len", "512", "--max-num-batched-tokens", "256"),
    ]
    model = str(target.resolved.folder)
    with VllmServer(folder=tmp_path, model=model, arguments=arguments, on_cpu=True) as server:
        client = CaptureClient(
            FilePayloads(tmp_path / "payloads"), namespace="run", generation=None, endpoints=Endpoint(server.url, model),
            manifest=manifest, concurrency=4, timeout_s=60.0, payload_timeout_s=60.0,
        )  # fmt: skip
        theirs = dict(client.capture(asked))
        assert client.submit(asked[0])["layer_ids"] == [1, 2, 3, 4]
    for key, ours in target.capture(asked):
        found = theirs[key]
        states = torch.cat([found.hidden_states, found.last_hidden_state[:, None]], 1).float()
        wanted = torch.cat([ours.hidden_states, ours.last_hidden_state[:, None]], 1)
        errors = (states - wanted).norm(dim=(0, 2)) / wanted.norm(dim=(0, 2))
        assert errors.max() < 0.06, (len(ours.token_ids), errors)
        neighbours = (states[1:] - wanted[:-1]).norm(dim=(0, 2)) / wanted[:-1].norm(dim=(0, 2))
        assert neighbours.min() > 0.3, neighbours  # so that the tolerance means something
