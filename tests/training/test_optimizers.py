"""Optimizer recipes."""

import pytest
import torch
from torch import nn

from dspark_lab.training.optimizers import AdamW, Muon, OptimizerRecipe


def adamw(**overrides) -> AdamW:
    return AdamW(**{"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **overrides})


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.embedding = nn.Linear(3, 2), nn.RMSNorm(2), nn.Embedding(5, 4)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_only_matrices_decay():
    network = Network()
    optimizer = adamw().build(network)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {
        id(network.linear.weight): 0.1,
        id(network.embedding.weight): 0.1,
        id(network.linear.bias): 0.0,
        id(network.norm.weight): 0.0,
    }
    assert {(group["lr"], group["betas"], group["eps"]) for group in optimizer.param_groups} == {
        (1e-3, (0.9, 0.95), 1e-8)
    }


def test_decay_shrinks_matrices_alone():
    network = Network()
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adamw(lr=0.5).build(network).step()
    for name, parameter in network.named_parameters():
        factor = 1 - 0.5 * 0.1 if name in ("linear.weight", "embedding.weight") else 1.0
        assert torch.allclose(parameter, factor * before[name], rtol=1e-6), name


def test_a_recipe_is_what_builds_an_optimizer():
    """The check that a drafter's constructor makes."""
    assert isinstance(adamw(), OptimizerRecipe)
    assert not isinstance(1e-3, OptimizerRecipe)


def test_recipe_values_may_come_from_yaml():
    recipe = adamw(lr=1, betas=[0.9, 0.99])
    assert recipe.lr == 1.0 and recipe.betas == (0.9, 0.99)


@pytest.mark.parametrize("lr", [0.0, -1e-3])
def test_lr_must_be_positive(lr: float):
    with pytest.raises(ValueError, match=rf"lr={lr} must be positive"):
        adamw(lr=lr)


@pytest.mark.parametrize("key, value", [("lr", "fast"), ("betas", (0.9,)), ("weight_decay", None)])
def test_wrong_types_name_their_key(key: str, value: object):
    with pytest.raises(ValueError, match=key):
        adamw(**{key: value})


def muon(**overrides) -> Muon:
    return Muon(**{"lr": 1e-3, "momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **overrides})


def test_muon_groups_hold_every_trainable_parameter_once_with_its_kind_and_decay():
    network = Network()
    optimizer = muon().build(network)
    found = {id(p): (group["kind"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(found)
    assert found == {
        id(network.linear.weight): ("muon", 0.1),
        id(network.embedding.weight): ("adamw", 0.1),
        id(network.linear.bias): ("adamw", 0.0),
        id(network.norm.weight): ("adamw", 0.0),
    }
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3}


def test_muon_is_a_recipe():
    assert isinstance(muon(), OptimizerRecipe)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"lr": 0}, "lr=0.0 must be positive"), ({"momentum": 1.0}, r"momentum=1.0 must lie in \[0, 1\)")],
)
def test_muon_values_are_checked(overrides: dict, message: str):
    with pytest.raises(ValueError, match=message):
        muon(**overrides)
