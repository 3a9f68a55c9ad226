"""One conversation, its states as an engine has them, and the manifest they fit: of tests with a server of their own."""

import torch

from dspark_lab.records import TokenizedConversation
from dspark_lab.store.protocol import Manifest

MANIFEST = Manifest(
    "tiny", revision="r", fingerprint="f", template_hash="t", layer_ids=(1, 2), hidden_size=8, engine="vllm"
)
CONVERSATION = TokenizedConversation("c", torch.arange(5, 42), torch.arange(37) > 20)
STATES = torch.randn(37, 3, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
