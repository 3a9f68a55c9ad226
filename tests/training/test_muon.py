"""Muon and AdamW as one optimizer: which parameter goes where, and that a resumed one goes on as if nothing happened."""

import pytest
import torch
from torch import Tensor, nn

from dspark_lab.training.muon import MuonAdamW, split_by_kind
from dspark_lab.training.optimizers import WarmupCosine

RECIPE = {"lr": 1e-2, "momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 6)
        self.norm = nn.RMSNorm(6)
        self.head = nn.Linear(6, 8, bias=False)
        self.confidence = nn.Linear(6, 1)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def head_modules(self) -> list[nn.Module]:
        return [self.head]

    def forward(self, token_ids: Tensor) -> Tensor:
        hidden = self.norm(self.layer(self.embedding(token_ids)))
        return self.head(hidden).square().mean() + self.confidence(hidden).square().mean()


def test_muon_gets_matrices_of_layers_alone() -> None:
    network = Network()
    names = {id(p): name for name, p in network.named_parameters()}
    matrices, others = ([names[id(p)] for p in group] for group in split_by_kind(network))
    assert matrices == ["layer.weight"]
    assert others == [
        "embedding.weight", "layer.bias", "norm.weight", "head.weight", "confidence.weight", "confidence.bias"
    ]  # fmt: skip


def train(network: Network, optimizer: torch.optim.Optimizer, schedule: object, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        network(torch.arange(8)).backward()
        optimizer.step()
        schedule.step()  # pyright: ignore
        assert step >= 0


def test_resumed_optimizer_goes_on_bit_for_bit() -> None:
    def start(network: Network) -> tuple:
        optimizer = MuonAdamW(**RECIPE).build(network)
        return optimizer, WarmupCosine(warmup_share=0.2, final_share=0.0).build(optimizer, num_steps=10)

    whole, first, second = Network(), Network(), Network()
    train(whole, *start(whole), steps=6)
    optimizer, schedule = start(first)
    train(first, optimizer, schedule, steps=3)
    resumed, resumed_schedule = start(second)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    resumed_schedule.load_state_dict(schedule.state_dict())
    train(second, resumed, resumed_schedule, steps=3)
    for ours, theirs in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_moves_a_matrix_by_about_the_size_of_an_adamw_step() -> None:
    network = Network()
    before = network.layer.weight.detach().clone()
    optimizer = MuonAdamW(**RECIPE).build(network)
    network(torch.arange(8)).backward()
    optimizer.step()
    moved = (network.layer.weight.detach() - before).square().mean().sqrt()
    assert 0.1 * RECIPE["lr"] < float(moved) < RECIPE["lr"]


def test_lr_must_be_positive() -> None:
    with pytest.raises(ValueError, match="lr=0"):
        MuonAdamW(**{**RECIPE, "lr": 0})
