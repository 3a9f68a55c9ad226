"""Every term and its closed-form gradient against token-by-token loops, and what may not matter to them."""

import math

import naive_reference as naive
import pytest
import torch
from torch import Tensor

from dspark_lab.drafter import divergences
from dspark_lab.drafter.divergences import TERMS, Divergences, diverge

TEACHER, FLAT = torch.tensor([[2.0, 1.0, 0.0]]), torch.zeros(1, 3)


def measured(
    logits: Tensor, teacher: Tensor, weights: dict[str, float], labels: Tensor | None = None, **options
) -> Divergences:
    """Each slot with a row of its own; the inputs are kept."""
    row = torch.arange(teacher.shape[0]).view(logits.shape[:-1])
    return diverge(logits.clone(), teacher.clone(), row, weights=weights, labels=labels, **options)


def test_golden_terms():
    """The worked check of section 4.1: p = softmax([2, 1, 0]), q uniform."""
    found = measured(FLAT, TEACHER, dict.fromkeys(TERMS, 1.0))
    expected = {
        "ce": 1.098612,  # against the target's arg-max
        "soft_ce": 1.098612,
        "kl": 0.266217,
        "tv": 0.331908,
        "l1": 0.663816,
        "nla": 0.403329,
    }
    for name, value in expected.items():
        assert float(found.values[name]) == pytest.approx(value, abs=1e-6), name
    entropy = measured(TEACHER, TEACHER, {"soft_ce": 1.0})
    assert float(entropy.values["soft_ce"]) == pytest.approx(0.832395, abs=1e-6)  # H(p)
    hard = measured(TEACHER, TEACHER, {"ce": 1.0}, torch.tensor([1]))
    assert float(hard.values["ce"]) == pytest.approx(-math.log(0.24473), abs=1e-5)
    assert float(hard.label_probability) == pytest.approx(0.24473, abs=1e-5)


def example(slots: int = 6, vocabulary: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """p and q differ much, but in the last slot, where they hardly do."""
    generator = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(slots, vocabulary, generator=generator)
    teacher = torch.cat([2 * torch.randn(slots - 1, vocabulary, generator=generator), logits[-1:] + 1e-3])
    teacher[-1, 0] += 0.05
    return logits, teacher, torch.randint(0, vocabulary, (slots,), generator=generator)


def assert_equals_the_loops(weights: dict[str, float], tile_elements: int | None = None, monkeypatch=None) -> None:
    if tile_elements is not None:
        monkeypatch.setattr(divergences, "_TILE_ELEMENTS", tile_elements)
    logits, teacher, labels = example()
    upstream = torch.tensor([1.0, 0.0, -2.0, 0.5, 3.0, 1.0])
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    # Through an operation, as logits come from a head: a leaf may not be overwritten.
    found = diverge(leaf * 1.0, teacher.clone(), torch.arange(6), weights=weights, labels=labels)
    terms = [
        naive.divergences(z, p.double().softmax(0), int(x)) for z, p, x in zip(exact, teacher, labels, strict=True)
    ]
    expected = torch.stack([sum(weight * slot[name] for name, weight in weights.items()) for slot in terms])
    assert torch.allclose(found.total.detach().double(), expected.detach(), rtol=1e-6, atol=1e-6)
    for name in weights:
        values = torch.stack([slot[name] for slot in terms]).detach()
        assert torch.allclose(found.values[name].double(), values, rtol=1e-6, atol=1e-6), name
        assert not found.values[name].requires_grad
    (upstream * found.total).sum().backward()
    (upstream * expected).sum().backward()
    assert leaf.grad is not None and exact.grad is not None
    assert (leaf.grad - exact.grad).abs().max() < 2e-6


@pytest.mark.parametrize("name", TERMS)
def test_every_term_and_its_gradient_are_the_definitions(name: str):
    assert_equals_the_loops({name: 0.7})


@pytest.mark.parametrize("tile_elements", [1, 7, 15, 1000])
def test_all_terms_together_in_tiles_of_any_size(tile_elements: int, monkeypatch):
    weights = {name: 0.1 * (index + 1) for index, name in enumerate(TERMS)}
    assert_equals_the_loops(weights, tile_elements, monkeypatch)


def test_terms_vanish_where_the_distributions_are_equal():
    logits, _, _ = example()
    names = ("kl", "reverse_kl", "js", "tv", "l1", "nla", "lk")
    same = measured(logits, logits, dict.fromkeys(names, 1.0))
    for name in names:
        assert float(same.values[name].abs().max()) < 2e-6, name


def test_slots_that_share_a_token_share_its_row():
    logits, teacher, labels = example()
    row = torch.tensor([[0, 1, 1], [2, 0, 2]])
    weights = {"kl": 1.0, "l1": 0.5, "ce": 0.1}
    shared = diverge(logits.view(2, 3, -1).clone(), teacher[:3].clone(), row, weights=weights, labels=labels.view(2, 3))
    alone = measured(logits, teacher[row.flatten()], weights, labels)
    assert torch.equal(shared.total.flatten(), alone.total)
    by_target = diverge(logits.clone(), teacher[:3].clone(), row.flatten(), weights={"ce": 1.0}, labels=None)
    chosen = teacher[:3].argmax(-1)[row.flatten()]
    assert torch.equal(by_target.total, measured(logits, teacher, {"ce": 1.0}, chosen).total)


def test_a_label_outside_the_draft_vocabulary_has_no_cross_entropy_gradient_or_probability():
    logits, _, labels = example()
    counted = torch.tensor([True, False, True, True, True, True])
    leaf = logits.clone().requires_grad_()
    found = diverge(leaf * 1.0, None, labels, weights={"ce": 2.0}, labels=labels, counted=counted)
    assert float(found.total.detach()[1]) == 0.0 == float(found.label_probability[1])
    assert float(found.label_probability[0]) > 0
    found.total.sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad[1] == 0).all() and (leaf.grad[0] != 0).all()


def test_terms_wanted_without_a_weight_have_no_gradient():
    logits, teacher, labels = example()
    leaf = logits.clone().requires_grad_()
    found = diverge(
        leaf * 1.0, teacher.clone(), torch.arange(6), weights={"ce": 1.0}, labels=labels, also=frozenset({"tv"})
    )
    found.total.sum().backward()
    only_ce = logits.clone().requires_grad_()
    diverge(only_ce * 1.0, None, labels, weights={"ce": 1.0}, labels=labels).total.sum().backward()
    assert leaf.grad is not None and only_ce.grad is not None and torch.equal(leaf.grad, only_ce.grad)
    expected = 0.5 * (logits.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)
    assert torch.allclose(found.values["tv"], expected, atol=1e-6)


def test_softmaxes_are_fp32_whatever_the_logits_are():
    logits, teacher, labels = (tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in example())
    weights = dict.fromkeys(TERMS, 1.0)
    low, high = (measured(z, t, weights, labels) for z, t in ((logits, teacher), (logits.float(), teacher.float())))
    assert low.total.dtype == torch.float32
    for name in TERMS:
        assert torch.equal(low.values[name], high.values[name]), name


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[2000.0, -2000.0, 0.0]]).requires_grad_()
    found = diverge(
        logits * 1.0,
        torch.tensor([[-500.0, 500.0, 0.0]]),
        torch.tensor([0]),
        weights=dict.fromkeys(TERMS, 1.0),
        labels=None,
    )
    assert found.total.isfinite().all()
    found.total.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
