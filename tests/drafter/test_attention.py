"""The one attention of all drafters, against a loop over queries, heads and keys."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_world import ALL, SPEC, assert_close, build, document, pack
from torch import Tensor

from dspark_lab.drafter import attention
from dspark_lab.drafter.attention import CHUNK, Visibility, attend

HEADS, KEY_HEADS, HEAD_DIM, VALUE_DIM = 4, 2, 8, 6


def block_pattern(num_context: int, *, num_blocks: int, block_size: int) -> Visibility:
    """Anchors spread over documents of 50 tokens."""
    anchors = torch.linspace(0, num_context - 1, num_blocks).long().repeat_interleave(block_size)
    return Visibility(anchors - anchors % 50, anchors, block_size)


def chain_pattern(num_context: int, *, num_queries: int) -> Visibility:
    slots = torch.linspace(0, num_context - 1, num_queries).long()
    return Visibility(slots - slots % 50, slots + 1, 1)


def long_documents() -> Visibility:
    """Blocks of four documents, the second of them short: chunks end where a long one does."""
    ends = torch.tensor([CHUNK, CHUNK + 40, 2 * CHUNK + 40, 3 * CHUNK + 40])
    starts = torch.tensor([0, CHUNK, CHUNK + 40, 2 * CHUNK + 40])
    return Visibility(starts.repeat_interleave(10), ends.repeat_interleave(10), 5)


def window(visibility: Visibility, tokens: int, *, ahead: Tensor | int) -> Visibility:
    return visibility.within(tokens, ahead=ahead, causal=True)


PATTERNS: dict[str, tuple[Callable[[], Visibility], int, int]] = {  # visibility, context tokens, own keys per query
    "one block": (lambda: block_pattern(60, num_blocks=1, block_size=8), 60, 1),
    "blocks over chunks": (lambda: block_pattern(120, num_blocks=50, block_size=7), 120, 1),
    "blocks larger than a chunk": (lambda: block_pattern(70, num_blocks=2, block_size=CHUNK + 5), 70, 1),
    "causal": (lambda: chain_pattern(2 * CHUNK + 30, num_queries=2 * CHUNK + 30), 2 * CHUNK + 30, 0),
    "causal, a whole chunk": (lambda: chain_pattern(CHUNK, num_queries=CHUNK), CHUNK, 0),
    "test-time training": (lambda: chain_pattern(300, num_queries=CHUNK + 1), 300, 3),
    "causal blocks": (lambda: replace(block_pattern(120, num_blocks=50, block_size=7), causal=True), 120, 1),
    "window from the anchor": (lambda: window(block_pattern(120, num_blocks=50, block_size=7), 9, ahead=0), 120, 1),
    "window from the query": (
        lambda: window(block_pattern(120, num_blocks=50, block_size=7), 9, ahead=torch.arange(350) % 7 + 1),
        120,
        1,
    ),
    "long documents": (lambda: long_documents(), 3 * CHUNK + 40, 1),
    "no context": (lambda: Visibility(torch.zeros(6).long(), torch.zeros(6).long(), 3), 0, 1),
}


def inputs(num_queries: int, num_context: int, num_own: int):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query = normal(num_queries, HEADS, HEAD_DIM)

    def keys_values(count: int) -> tuple[Tensor, Tensor]:
        return normal(count, KEY_HEADS, HEAD_DIM), normal(count, KEY_HEADS, VALUE_DIM)

    context = keys_values(num_context)
    own = [keys_values(num_queries) for _ in range(num_own)]
    return query, context, own


def naive_attention(query: Tensor, context, own, mask: Tensor) -> Tensor:
    key = torch.cat([context[0], *(k for k, _ in own)]).double()
    value = torch.cat([context[1], *(v for _, v in own)]).double()
    out = torch.zeros(*query.shape[:2], VALUE_DIM, dtype=torch.float64)
    for q in range(query.shape[0]):
        visible = mask[q].nonzero().flatten()
        for head in range(HEADS):
            key_head = head // (HEADS // KEY_HEADS)
            scores = key[visible, key_head] @ query[q, head].double() / math.sqrt(HEAD_DIM)
            out[q, head] = scores.softmax(0) @ value[visible, key_head]
    return out


@pytest.mark.parametrize("pattern", PATTERNS)
def test_equals_the_loop_over_the_dense_mask(pattern: str):
    make, num_context, num_own = PATTERNS[pattern]
    visibility = make()
    query, context, own = inputs(visibility.lower.numel(), num_context, num_own)
    expected = naive_attention(query, context, own, visibility.dense(num_context, num_own))
    assert_close(attend(query, context, own, visibility), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("pattern", ["blocks over chunks", "causal", "test-time training", "no context"])
def test_flex_attention_sees_the_same(pattern: str):
    make, num_context, num_own = PATTERNS[pattern]
    visibility = make()
    query, context, own = inputs(visibility.lower.numel(), num_context, num_own)
    assert_close(
        attention._attend_flex(query, context, own, visibility), attend(query, context, own, visibility), relative=1e-5
    )


def test_no_queries_give_no_outputs():
    empty = torch.zeros(0, dtype=torch.int64)
    query, context, own = inputs(0, 5, 1)
    assert attend(query, context, own, Visibility(empty, empty, 4)).shape == (0, HEADS, VALUE_DIM)


def test_gradients_equal_those_of_one_dense_call():
    make, num_context, num_own = PATTERNS["test-time training"]
    visibility = make()
    query, context, own = inputs(visibility.lower.numel(), num_context, num_own)
    leaves = [query, *context, *(tensor for pair in own for tensor in pair)]
    for leaf in leaves:
        leaf.requires_grad_()
    upstream = torch.randn(*query.shape[:2], VALUE_DIM, generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad(attend(query, context, own, visibility), leaves, upstream)
    key, value = (torch.cat([context[i], *(pair[i] for pair in own)]).repeat_interleave(2, dim=1) for i in (0, 1))
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(HEAD_DIM)
    weights = scores.masked_fill(~visibility.dense(num_context, num_own), -torch.inf).softmax(-1)
    dense = torch.einsum("hqk,khd->qhd", weights, value)
    for a, b in zip(actual, torch.autograd.grad(dense, leaves, upstream), strict=True):
        assert_close(a, b)


def visible_keys(mask: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in mask]


def test_mask_of_two_blocks():
    """Golden test 4: T = 6, anchors 2 and 4, blocks of 2; ten keys."""
    anchors = torch.tensor([2, 4]).repeat_interleave(2)
    mask = Visibility(torch.zeros(4).long(), anchors, 2).dense(6, 1)
    assert mask.shape == (4, 10)
    assert visible_keys(mask) == [[0, 1, 6, 7], [0, 1, 6, 7], [0, 1, 2, 3, 8, 9], [0, 1, 2, 3, 8, 9]]


def test_mask_of_training_time_test():
    """Golden test 5: T = 3, steps 1 and 2."""
    index = torch.arange(3)
    visibility = Visibility(torch.zeros(3).long(), index + 1, 1)
    assert visible_keys(visibility.dense(3, 0)) == [[0], [0, 1], [0, 1, 2]]
    assert visible_keys(visibility.dense(3, 1)) == [[0, 3], [0, 1, 4], [0, 1, 2, 5]]
    assert visible_keys(visibility.dense(3, 2)) == [[0, 3, 6], [0, 1, 4, 7], [0, 1, 2, 5, 8]]


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_masks_stay_small_on_a_long_row(name: str, monkeypatch: pytest.MonkeyPatch):
    """Rows of many documents: a mask holds the queries of one chunk and the keys that they span, for a key head."""
    length, count = 64, 32
    batch = pack([[document("0" * 8 + "1" * (length - 8), seed=n) for n in range(count)]], row_tokens=length * count)
    shapes = []
    real = F.scaled_dot_product_attention

    def spy(*args, attn_mask: Tensor, **kwargs):
        shapes.append(tuple(attn_mask.shape[-2:]))
        return real(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    overrides = {} if name == "eagle3" else {"num_anchors": ALL, "block_size": 8}
    drafter = build(name, **overrides)
    with torch.no_grad():
        drafter(batch)
    shared = SPEC.num_attention_heads // SPEC.num_key_value_heads
    assert len(shapes) > 20
    assert max(rows for rows, _ in shapes) == shared * CHUNK
    # A chunk's queries lie in at most CHUNK consecutive supervised tokens, so in a few documents.
    assert max(keys for _, keys in shapes) <= 4 * length + 3 * CHUNK < length * count / 3


def test_a_window_is_counted_from_the_anchor_or_from_the_query():
    """A block of 3 at anchor 6 of a document that starts at 1, window 4."""
    full = Visibility(torch.tensor([1, 1, 1]), torch.tensor([6, 6, 6]), 3)
    assert full.within(4, ahead=0, causal=False).lower.tolist() == [2, 2, 2]  # as Speculators: anchor - 4
    slot = torch.arange(3)
    assert full.within(4, ahead=slot + 1, causal=False).lower.tolist() == [3, 4, 5]  # key > query - 4
    assert full.within(2, ahead=slot + 1, causal=False).lower.tolist() == [5, 6, 6], "never beyond the context"
    assert full.within(9, ahead=0, causal=False).lower.tolist() == [1, 1, 1], "never into another document"
    mask = full.within(4, ahead=0, causal=True).dense(6, 1)
    assert mask[:, 6:].tolist() == [[True, False, False], [True, True, False], [True, True, True]]
