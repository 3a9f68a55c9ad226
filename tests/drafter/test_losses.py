"""The confidence term, and the walk over chunks against the plain computation."""

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from tiny_world import assert_close
from torch import Tensor, nn

from dspark_lab.drafter.losses import LossTerms, confidence_loss, walk_chunks


def total_variation(logits: Tensor, teacher: Tensor) -> Tensor:
    return 0.5 * (logits.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)


def test_confidence_loss_is_binary_cross_entropy_against_a_clamped_target():
    logits, acceptance = torch.tensor([0.0, 2.0, -1.0]), torch.tensor([0.3, 1.0 + 1e-6, -1e-6])
    c = logits.sigmoid()
    expected = [math.log(2), -math.log(float(c[1])), -math.log(1 - float(c[2]))]
    assert confidence_loss(logits, acceptance).tolist() == pytest.approx(expected, rel=1e-6)


def test_no_gradient_through_the_confidence_target():
    """Golden test 17 at the level of the term: c* = 1 - TV is a constant."""
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    confidence = torch.zeros(4, requires_grad=True)
    teacher = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    acceptance = 1 - total_variation(logits, teacher)
    assert acceptance.requires_grad
    loss = confidence_loss(confidence, acceptance).sum()
    by_logits, by_confidence = torch.autograd.grad(loss, (logits, confidence), allow_unused=True)
    assert by_logits is None
    assert_close(by_confidence, 0.5 - acceptance.detach())


BLOCKS, SLOTS, WIDTH, VOCAB = 7, 3, 6, 11
WEIGHTS = {"ce": 0.3, "confidence": 2.0}


class Heads(nn.Module):
    """A frozen head with a low-rank bias and a confidence head, as DSpark's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w1, self.w2 = nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB, bias=False)
        self.confidence = nn.Linear(WIDTH + 4, 1)
        self.frozen = torch.randn(VOCAB, WIDTH)
        self.labels = torch.randint(0, VOCAB, (BLOCKS, SLOTS))
        self.teacher = torch.randn(BLOCKS, SLOTS, VOCAB)
        self.logit_sizes: list[int] = []

    def summands(self, blocks: slice, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        terms = self.terms(blocks, hidden)
        return sum((WEIGHTS[name] * term for name, term in terms.items()), torch.zeros(())), terms

    def terms(self, blocks: slice, hidden: Tensor) -> dict[str, Tensor]:
        embedded = self.w1(self.labels[blocks])
        logits = F.linear(hidden, self.frozen) + self.w2(embedded)
        self.logit_sizes.append(logits.shape[0])
        acceptance = 1 - total_variation(logits, self.teacher[blocks])
        confidence = self.confidence(torch.cat([hidden, embedded], -1)).squeeze(-1)
        return {
            "ce": cross_entropy(logits, self.labels[blocks]).sum(),
            "confidence": confidence_loss(confidence, acceptance).sum(),
        }


def hidden_states() -> Tensor:
    return torch.randn(BLOCKS, SLOTS, WIDTH, generator=torch.Generator().manual_seed(3)).requires_grad_()


def walked(heads: Heads, hidden: Tensor, chunk_blocks: int) -> LossTerms:
    return walk_chunks(
        heads.summands,
        hidden,
        terms=list(WEIGHTS),
        denominator=torch.tensor(5.0),
        parameters=list(heads.parameters()),
        chunk_blocks=chunk_blocks,
    )


@pytest.mark.parametrize("chunk_blocks", [1, 2, 3, BLOCKS, 100])
def test_walk_equals_the_plain_computation(chunk_blocks: int):
    heads, hidden = Heads(), hidden_states()
    plain = heads.terms(slice(None), hidden)
    expected = sum(WEIGHTS[name] * plain[name] for name in plain) / 5.0
    assert isinstance(expected, Tensor)
    leaves = [hidden, *heads.parameters()]
    expected_gradients = torch.autograd.grad(3.0 * expected, leaves)

    heads.logit_sizes.clear()
    walk = walked(heads, hidden, chunk_blocks)
    assert max(heads.logit_sizes) == min(chunk_blocks, BLOCKS)
    assert sum(heads.logit_sizes) == BLOCKS, "nothing is computed twice"
    assert_close(walk.total, expected)
    for name, term in walk.terms.items():
        assert_close(term, plain[name] / 5.0)
        assert not term.requires_grad
    # The gradient must take the factor that comes from above (here 3; with mixed precision or accumulation, a scale).
    for actual, gradient in zip(torch.autograd.grad(3.0 * walk.total, leaves), expected_gradients, strict=True):
        assert_close(actual, gradient)


def test_walk_without_gradients_gives_the_same_loss():
    heads, hidden = Heads(), hidden_states()
    expected = walked(heads, hidden, 2)
    with torch.no_grad():
        actual = walked(heads, hidden, 2)
    assert not actual.total.requires_grad
    assert_close(actual.total, expected.total.detach())
    assert actual.terms.keys() == expected.terms.keys()


def test_heads_train_over_a_frozen_network():
    heads = Heads()
    hidden = hidden_states().detach()
    plain = heads.terms(slice(None), hidden)
    expected = sum(WEIGHTS[name] * plain[name] for name in plain) / 5.0
    leaves = list(heads.parameters())
    actual = torch.autograd.grad(walked(heads, hidden, 2).total, leaves)
    for a, b in zip(actual, torch.autograd.grad(expected, leaves), strict=True):
        assert_close(a, b)


def test_no_blocks_give_a_zero_loss_and_zero_gradients():
    hidden = torch.zeros(0, SLOTS, WIDTH, requires_grad=True)
    heads = Heads()
    walk = walked(heads, hidden, 2)
    gradients = torch.autograd.grad(walk.total, [hidden, *heads.parameters()])
    assert walk.total == 0 and all(term == 0 for term in walk.terms.values())
    assert all((gradient == 0).all() for gradient in gradients)


def test_saved_logits_do_not_outlive_their_chunk():
    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()  # with its graph, an output would keep itself alive through this very hook

    alive: weakref.WeakSet[Kept] = weakref.WeakSet()
    most = [0]

    def num_logits() -> int:
        shapes = [kept.tensor.shape for kept in alive if kept.tensor.dtype == torch.float32]
        return sum(shape.numel() for shape in shapes if shape in ((2, SLOTS, VOCAB), (2 * SLOTS, VOCAB)))

    def pack(tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        alive.add(kept)
        most[0] = max(most[0], num_logits())
        return kept

    hidden = hidden_states()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        walked(Heads(), hidden[:2], 2)
        of_one_chunk, most[0] = most[0], 0
        walk = walked(Heads(), hidden, 2)
    assert 0 < most[0] == of_one_chunk
    assert num_logits() == 0
    walk.total.backward()
