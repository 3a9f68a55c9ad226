"""The one attention pattern of all drafters: a run of context, and keys of one's own.

A query sees the context keys ``lower <= j < upper`` (a contiguous run, since the tokens of a document are) and the own
keys of its group. For block drafters a group is a block of slots, and ``upper`` is the anchor: strictly earlier states.
For EAGLE-3 a group is one slot, and its own keys are those of its earlier training-time-test steps. A sliding window
raises ``lower``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 128
"""Queries that share one mask on CPU: none is larger than [CHUNK x heads per key head, context of the chunk + own keys]."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """``lower``, ``upper``: int64 [Q], lower <= upper. Queries come in consecutive groups of ``group_size``.

    ``causal``: a query sees the own keys of its group up to itself only.
    """

    lower: Tensor
    upper: Tensor
    group_size: int
    causal: bool = False

    def __getitem__(self, queries: Tensor | slice) -> "Visibility":
        """That of some queries, whole groups if they have more than one slot."""
        return Visibility(self.lower[queries], self.upper[queries], self.group_size, self.causal)

    def within(self, window: int, *, ahead: Tensor | int, causal: bool) -> "Visibility":
        """Only the last ``window - ahead`` context keys; ``ahead`` [Q]: places that a query is beyond its ``upper``."""
        lower = torch.maximum(self.lower, torch.minimum(self.upper + ahead - window, self.upper))
        return Visibility(lower, self.upper, self.group_size, causal)

    def own(self, query: Tensor, slot: Tensor) -> Tensor:
        """bool: whether the own key of ``slot`` is in the query's group and not hidden from it."""
        same = query // self.group_size == slot // self.group_size
        return same & (slot <= query) if self.causal else same

    def dense(self, num_context: int, num_own: int) -> Tensor:
        """bool [Q, num_context + num_own * Q]: the mask this stands for (own keys step by step, each [Q])."""
        query = torch.arange(self.lower.numel(), device=self.lower.device)
        key = torch.arange(num_context, device=self.lower.device)
        context = (key >= self.lower[:, None]) & (key < self.upper[:, None])
        return torch.cat([context] + [self.own(query[:, None], query)] * num_own, dim=1)


def attend(
    query: Tensor,
    context: tuple[Tensor, Tensor],
    own: Sequence[tuple[Tensor, Tensor]],
    visibility: Visibility,
) -> Tensor:
    """Softmax attention with scale D^-0.5 and grouped heads.

    Shapes: query [Q, Hq, D]; context keys [N, Hkv, D] and values [N, Hkv, Dv]; each of ``own`` [Q, Hkv, D] and [Q, Hkv, Dv].
    Returns [Q, Hq, Dv].
    """
    if query.shape[0] == 0:
        # Still a function of all inputs: DDP waits for a gradient of every parameter, from ranks without anchors too.
        total = torch.stack([tensor.sum() for tensor in (query, *(t for pair in (context, *own) for t in pair))]).sum()
        return total.expand(0, query.shape[1], context[1].shape[-1])
    if query.is_cuda:
        return _attend_flex(query, context, own, visibility)
    return torch.cat([_attend_chunk(query, context, own, visibility, rows) for rows in _chunks(visibility)])


def _chunks(visibility: Visibility) -> Iterator[slice]:
    """Whole groups, at most ``CHUNK`` queries, that end where a long context ends: no query pays for another's document."""
    size = visibility.group_size
    lower = visibility.lower.view(-1, size).amin(1).tolist()
    upper = visibility.upper.view(-1, size).amax(1).tolist()
    start, first, last = 0, lower[0], upper[0]
    for group in range(1, len(lower)):
        full = (group - start + 1) * size > CHUNK
        left_behind = lower[group] >= last and last - first >= CHUNK
        if full or left_behind:
            yield slice(start * size, group * size)
            start, first, last = group, lower[group], upper[group]
        else:
            first, last = min(first, lower[group]), max(last, upper[group])
    yield slice(start * size, len(lower) * size)


def _attend_chunk(
    query: Tensor,
    context: tuple[Tensor, Tensor],
    own: Sequence[tuple[Tensor, Tensor]],
    visibility: Visibility,
    rows: slice,
) -> Tensor:
    part = visibility[rows]
    first, last = int(part.lower.min()), int(part.upper.max())
    key = torch.cat([context[0][first:last], *(k[rows] for k, _ in own)])
    value = torch.cat([context[1][first:last], *(v[rows] for _, v in own)])
    mask = replace(part, lower=part.lower - first, upper=part.upper - first).dense(last - first, len(own))
    # Query heads that share a key head become more queries of that head: keys and values are not repeated.
    num_queries, num_heads, head_dim = query[rows].shape
    shared = num_heads // key.shape[1]
    folded = query[rows].view(num_queries, key.shape[1], shared, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    out = F.scaled_dot_product_attention(
        folded[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], attn_mask=mask.repeat(shared, 1)
    )
    return out[0].view(key.shape[1], shared, num_queries, -1).permute(2, 0, 1, 3).flatten(1, 2)


def _attend_flex(
    query: Tensor,
    context: tuple[Tensor, Tensor],
    own: Sequence[tuple[Tensor, Tensor]],
    visibility: Visibility,
) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    num_queries, num_context = query.shape[0], context[0].shape[0]
    lower, upper = visibility.lower, visibility.upper

    def visible(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        in_context = (kv < num_context) & (kv >= lower[q]) & (kv < upper[q])
        return in_context | ((kv >= num_context) & visibility.own(q, (kv - num_context) % num_queries))

    key = torch.cat([context[0], *(k for k, _ in own)])
    value = torch.cat([context[1], *(v for _, v in own)])
    mask = create_block_mask(visible, None, None, num_queries, key.shape[0], device=str(query.device))
    kernel = torch.compile(flex_attention, dynamic=True) if query.is_cuda else flex_attention
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    out = kernel(q, k, v, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
    assert isinstance(out, Tensor)
    return out[0].transpose(0, 1)
