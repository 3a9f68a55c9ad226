"""Samples -> rows of ``row_tokens`` -> batches: pure functions of lengths, seed and epoch."""

import random
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from dspark_lab.records import Batch, TargetSample, TokenizedConversation


@dataclass(frozen=True, slots=True)
class SampleOutline:
    """What packing needs to know of a sample.

    ``enough_at``: where its supervised tokens become as many as are wanted; None when they do not.
    """

    key: str
    num_tokens: int
    enough_at: int | None

    @classmethod
    def of(cls, conversation: TokenizedConversation, *, min_supervised_tokens: int = 1) -> "SampleOutline":
        supervised = conversation.loss_mask.nonzero().flatten()
        enough = int(supervised[min_supervised_tokens - 1]) if supervised.numel() >= min_supervised_tokens else None
        return cls(conversation.key, len(conversation), enough)


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row: the samples whose tokens follow each other in it.

    ``index`` names the row within its epoch, whatever the rank or worker. ``repeated`` marks the copy that fills the
    last step of a rank without a row of its own: it is computed, never supervised.
    """

    index: int
    keys: tuple[str, ...]
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class PackingCounts:
    """What became of the samples, by reason. ``fill_rate`` is the share of the rows' tokens that are not padding."""

    num_samples: int
    num_rows: int
    num_tokens: int
    fill_rate: float
    duplicates: int
    truncated: int
    skipped_without_supervised_tokens: int
    skipped_by_truncation: int  # enough of them only beyond row_tokens


def select_samples(
    outlines: Iterable[SampleOutline], *, row_tokens: int
) -> tuple[list[tuple[str, int]], PackingCounts]:
    """(key, length in a row) of each sample to train on, and the counts of all.

    A sample longer than ``row_tokens`` loses its end; one without enough supervised tokens, or left without by that, is
    skipped.
    """
    lengths: dict[str, int] = {}
    duplicates = truncated = without_supervised = by_truncation = 0
    for outline in outlines:
        if outline.enough_at is None:
            without_supervised += 1
        elif outline.enough_at >= row_tokens:
            by_truncation += 1
        elif outline.key in lengths:
            duplicates += 1
        else:
            truncated += outline.num_tokens > row_tokens
            lengths[outline.key] = min(outline.num_tokens, row_tokens)
    selected = list(lengths.items())
    num_rows = len(plan_rows(selected, row_tokens=row_tokens, seed=0, epoch=0))
    num_tokens = sum(lengths.values())
    return selected, PackingCounts(
        num_samples=len(selected),
        num_rows=num_rows,
        num_tokens=num_tokens,
        fill_rate=num_tokens / (num_rows * row_tokens) if num_rows else 0.0,
        duplicates=duplicates,
        truncated=truncated,
        skipped_without_supervised_tokens=without_supervised,
        skipped_by_truncation=by_truncation,
    )


def plan_rows(lengths: Sequence[tuple[str, int]], *, row_tokens: int, seed: int, epoch: int) -> list[Row]:
    """Pack samples, (key, tokens) each, into rows: a function of its arguments only, and not of the samples' order.

    Best fit, longest first, among lengths rounded up to six significant bits (at most 3 % of a sample, 1 % on average).
    Samples of one rounded length are interchangeable and shuffled anew each epoch, so rows mix differently, yet *their
    number is the same in every epoch*: it depends on the multiset of rounded lengths alone. Lightning reads a loader's
    length once and would cut longer epochs short.
    """
    shuffled = sorted(lengths)
    generator = random.Random(f"{seed}/{epoch}")
    generator.shuffle(shuffled)
    rounded = [(min(_round_up(length), row_tokens), key) for key, length in shuffled]
    rounded.sort(key=lambda sample: -sample[0])  # stable: shuffled among equals
    rows: list[list[str]] = []
    rows_by_free: dict[int, list[list[str]]] = defaultdict(list)
    free_sizes: list[int] = []  # keys of rows_by_free, ascending
    for length, key in rounded:
        place = bisect_left(free_sizes, length)
        if place < len(free_sizes):
            free = free_sizes[place]
            row = rows_by_free[free].pop()
            if not rows_by_free[free]:
                del rows_by_free[free], free_sizes[place]
        else:
            free, row = row_tokens, []
            rows.append(row)
        row.append(key)
        if free - length not in rows_by_free:
            insort(free_sizes, free - length)
        rows_by_free[free - length].append(row)
    generator.shuffle(rows)
    return [Row(index, tuple(keys)) for index, keys in enumerate(rows)]


def collate(rows: Sequence[tuple[Row, Sequence[TargetSample]]], *, row_tokens: int, epoch: int) -> Batch:
    """Rows and their samples -> ``Batch``.

    Samples are cut at ``row_tokens``; padding is token 0, mask False, document -1, position 0 and zero states. Document
    ids count through the batch.
    """
    like = rows[0][1][0]
    shape = (len(rows), row_tokens)
    token_ids = torch.zeros(shape, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    document_ids = torch.full(shape, -1, dtype=torch.int64)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    hidden_states = like.hidden_states.new_zeros(shape + like.hidden_states.shape[1:])
    last_hidden_state = like.last_hidden_state.new_zeros(shape + like.last_hidden_state.shape[1:])
    document = 0
    for index, (row, samples) in enumerate(rows):
        start = 0
        for sample in samples:
            length = min(sample.token_ids.numel(), row_tokens)
            span = (index, slice(start, start + length))
            token_ids[span] = sample.token_ids[:length]
            if not row.repeated:
                loss_mask[span] = sample.loss_mask[:length]
            document_ids[span] = document
            position_ids[span] = torch.arange(length)
            hidden_states[span] = sample.hidden_states[:length]
            last_hidden_state[span] = sample.last_hidden_state[:length]
            start += length
            document += 1
    return Batch(
        token_ids=token_ids,
        loss_mask=loss_mask,
        document_ids=document_ids,
        position_ids=position_ids,
        hidden_states=hidden_states,
        last_hidden_state=last_hidden_state,
        row_ids=tuple(row.index for row, _ in rows),
        epoch=epoch,
        keys=tuple(key for row, _ in rows for key in row.keys),
    )


def rank_rows(rows: Sequence[Row], *, rows_per_batch: int, rank: int, world_size: int) -> list[list[Row]]:
    """The batches of one rank: row r belongs to step r // (rows_per_batch * world_size) and rank r % world_size.

    Every rank makes the same number of steps; a rank without a row in the last one repeats a row unsupervised.
    """
    per_step = rows_per_batch * world_size
    batches = []
    for start in range(0, len(rows), per_step):
        step = rows[start : start + per_step]
        own = [row for row in step if row.index % world_size == rank]
        batches.append(own or [Row(start + rank, step[-1].keys, repeated=True)])
    return batches


def _round_up(length: int) -> int:
    quantum = 1 << max(length.bit_length() - 6, 0)
    return -(-length // quantum) * quantum
