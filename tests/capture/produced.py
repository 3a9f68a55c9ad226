"""Conversations, and states that follow from their token ids alone, so that every process knows what must arrive."""

import random

import torch
from torch import Tensor

from dspark_lab.records import TargetSample, TokenizedConversation
from dspark_lab.store.protocol import Manifest

VOCAB_SIZE, LAYER_IDS, HIDDEN_SIZE = 28, (0, 2, 3), 16  # of tests/drafter/tiny_world.py
MANIFEST = Manifest(
    "toy",
    revision="0",
    fingerprint="f",
    template_hash="t",
    layer_ids=LAYER_IDS,
    hidden_size=HIDDEN_SIZE,
    engine="vllm",
    dtype="float32",
)


def conversations(number: int, *, seed: int) -> list[TokenizedConversation]:
    generator = random.Random(seed)
    made = []
    for index in range(number):
        prompt, answer = generator.randrange(1, 8), generator.choice((2, 5, 9, 14))
        ids = torch.tensor([generator.randrange(VOCAB_SIZE) for _ in range(prompt + answer)])
        made.append(TokenizedConversation(f"{seed}-{index}", ids, torch.arange(prompt + answer) >= prompt))
    return made


def states_of(token_ids: Tensor) -> Tensor:
    """fp32 [T, L + 1, H], the last one of each token before the final norm."""
    generator = torch.Generator().manual_seed(hash(tuple(token_ids.tolist())) & (2**62 - 1))  # of integers: no salt
    return torch.randn(len(token_ids), len(LAYER_IDS) + 1, HIDDEN_SIZE, generator=generator)


def sample_of(conversation: TokenizedConversation) -> TargetSample:
    states = states_of(conversation.token_ids)
    return TargetSample(conversation.token_ids, conversation.loss_mask, states[:, :-1], states[:, -1])
