"""Optimizer and lr schedule recipes."""

import pytest
import torch
from torch import nn

from dspark_lab.training.optimizers import AdamW, OptimizerRecipe, WarmupCosine


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


@pytest.mark.parametrize(
    "step, expected",
    [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (55, 0.55), (100, 0.1), (250, 0.1)],
)
def test_warmup_and_cosine(step: int, expected: float):
    """100 steps, a tenth of them warm-up, down to a tenth of the peak; half-way down the cosine is the mean."""
    schedule = WarmupCosine(warmup_share=0.1, final_share=0.1)
    assert schedule.factor(step, num_steps=100) == pytest.approx(expected)


def test_cosine_at_a_quarter():
    schedule = WarmupCosine(warmup_share=0.2, final_share=0.0)
    assert schedule.factor(40, num_steps=100) == pytest.approx(0.5 * (1 + 2**-0.5))


def test_schedule_is_continuous_and_monotone_on_both_sides():
    schedule = WarmupCosine(warmup_share=0.25, final_share=0.05)
    factors = [schedule.factor(step, num_steps=40) for step in range(41)]
    assert factors[:10] == sorted(factors[:10]) and factors[9:] == sorted(factors[9:], reverse=True)
    assert all(0 < factor <= 1 for factor in factors)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_run_of_a_step_or_two_learns_at_the_peak_first(num_steps: int):
    assert WarmupCosine(warmup_share=0.04, final_share=0.05).factor(0, num_steps=num_steps) == 1.0


def test_no_warmup_starts_at_the_peak():
    assert WarmupCosine(warmup_share=0.0, final_share=0.0).factor(0, num_steps=10) == 1.0


def test_built_schedule_drives_every_group():
    optimizer = adamw(lr=2.0).build(Network())
    schedule = WarmupCosine(warmup_share=0.4, final_share=0.0).build(optimizer, num_steps=10)
    rates = []
    for _ in range(10):
        rates.append({group["lr"] for group in optimizer.param_groups})
        optimizer.step()
        schedule.step()
    assert [rate.pop() for rate in rates[:4]] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert all(len(rate) == 1 for rate in rates[4:])


@pytest.mark.parametrize("warmup_share", [-0.1, 1.0, 3.0])
def test_warmup_is_a_share(warmup_share: float):
    with pytest.raises(ValueError, match=rf"warmup_share={warmup_share} must lie in \[0, 1\)"):
        WarmupCosine(warmup_share=warmup_share, final_share=0.0)
