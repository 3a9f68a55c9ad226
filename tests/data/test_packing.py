import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dspark_lab.data.packing import Row, SampleOutline, collate, plan_rows, rank_rows, select_samples
from dspark_lab.records import TargetSample, TokenizedConversation


def lengths(num: int, *, seed: int = 0, mean: float = 250.0, deviation: float = 80.0) -> list[tuple[str, int]]:
    generator = random.Random(seed)
    return [(f"k{n:05d}", max(20, round(generator.gauss(mean, deviation)))) for n in range(num)]


def contents(rows: list[Row]) -> list[frozenset[str]]:
    return [frozenset(row.keys) for row in rows]


def sample(num_tokens: int, first: int, *, supervised: slice = slice(1, None)) -> TargetSample:
    """Token ids and states that say where they come from: state = token id."""
    token_ids = torch.arange(first, first + num_tokens)
    loss_mask = torch.zeros(num_tokens, dtype=torch.bool)
    loss_mask[supervised] = True
    states = token_ids.to(torch.bfloat16)
    return TargetSample(token_ids, loss_mask, states[:, None, None].expand(-1, 2, 3), states[:, None].expand(-1, 3))


@pytest.mark.parametrize("epoch", range(3))
def test_every_sample_is_in_exactly_one_row_and_no_row_is_too_long(epoch):
    samples = lengths(500)
    rows = plan_rows(samples, row_tokens=1024, seed=3, epoch=epoch)
    assert sorted(key for row in rows for key in row.keys) == [key for key, _ in samples]
    by_key = dict(samples)
    assert all(0 < sum(by_key[key] for key in row.keys) <= 1024 for row in rows)
    assert [row.index for row in rows] == list(range(len(rows)))


def test_rows_depend_on_seed_and_epoch_only():
    samples = lengths(500)
    reference = plan_rows(samples, row_tokens=1024, seed=3, epoch=1)
    shuffled = random.Random(5).sample(samples, len(samples))
    assert plan_rows(shuffled, row_tokens=1024, seed=3, epoch=1) == reference
    for seed, epoch in ((3, 2), (4, 1)):
        other = plan_rows(samples, row_tokens=1024, seed=seed, epoch=epoch)
        same = set(contents(other)) & set(contents(reference))
        assert len(same) < 0.1 * len(reference), "samples must meet others"
        assert [row.keys[0] for row in other] != [row.keys[0] for row in reference]


@pytest.mark.parametrize(("num", "mean"), [(7, 300), (100, 250), (1000, 60)])
def test_every_epoch_has_the_same_number_of_rows(num, mean):
    samples = lengths(num, mean=mean)
    counts = {len(plan_rows(samples, row_tokens=1024, seed=seed, epoch=e)) for e in range(20) for seed in range(3)}
    assert len(counts) == 1


@pytest.mark.parametrize(("mean", "deviation", "row_tokens"), [(250, 80, 1024), (310, 80, 1024), (800, 500, 4096)])
def test_rows_are_well_filled(mean, deviation, row_tokens):
    samples = lengths(1000, mean=mean, deviation=deviation)
    outlines = [SampleOutline(key, num_tokens, 0) for key, num_tokens in samples]
    _, counts = select_samples(outlines, row_tokens=row_tokens)
    assert counts.fill_rate > 0.95
    rows = plan_rows(samples, row_tokens=row_tokens, seed=0, epoch=0)
    assert counts.fill_rate == pytest.approx(sum(n for _, n in samples) / (len(rows) * row_tokens))


def test_samples_as_long_as_a_row_and_a_single_short_one_get_rows_of_their_own():
    assert len(plan_rows([("a", 1023), ("b", 1024)], row_tokens=1024, seed=0, epoch=0)) == 2
    assert plan_rows([("a", 3)], row_tokens=1024, seed=0, epoch=0) == [Row(0, ("a",))]
    assert plan_rows([], row_tokens=1024, seed=0, epoch=0) == []


def test_what_is_truncated_skipped_or_doubled_is_counted_by_reason():
    selected, counts = select_samples(
        [
            SampleOutline("fine", 10, 4),
            SampleOutline("fine", 10, 4),
            SampleOutline("long", 40, 15),
            SampleOutline("answer_cut_off", 40, 16),
            SampleOutline("silent", 10, None),
        ],
        row_tokens=16,
    )
    assert selected == [("fine", 10), ("long", 16)]
    assert (counts.num_samples, counts.num_rows, counts.num_tokens) == (2, 2, 26)
    assert counts.fill_rate == 26 / 32
    assert (counts.duplicates, counts.truncated) == (1, 1)
    assert (counts.skipped_without_supervised_tokens, counts.skipped_by_truncation) == (1, 1)


def test_the_outline_of_a_conversation():
    mask = torch.tensor([False, False, True, False, True])
    conversation = TokenizedConversation("c", torch.arange(5), mask)
    assert SampleOutline.of(conversation) == SampleOutline(conversation.key, 5, 2)
    assert SampleOutline.of(conversation, min_supervised_tokens=2).enough_at == 4
    assert SampleOutline.of(conversation, min_supervised_tokens=3).enough_at is None
    silent = TokenizedConversation("c", torch.arange(5), torch.zeros(5, dtype=torch.bool))
    assert SampleOutline.of(silent).enough_at is None


def test_collation_of_two_rows():
    rows = [(Row(4, ("a", "b")), [sample(3, 10), sample(2, 20)]), (Row(5, ("c",)), [sample(9, 30)])]
    batch = collate(rows, row_tokens=6, epoch=2)
    assert batch.token_ids.tolist() == [[10, 11, 12, 20, 21, 0], [30, 31, 32, 33, 34, 35]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, 2, 2]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert (batch.row_ids, batch.epoch, batch.keys) == ((4, 5), 2, ("a", "b", "c"))
    assert (batch.num_tokens, batch.num_supervised_tokens) == (11, 8)
    assert batch.hidden_states.shape == (2, 6, 2, 3) and batch.last_hidden_state.shape == (2, 6, 3)
    assert batch.hidden_states.dtype == batch.last_hidden_state.dtype == torch.bfloat16
    assert torch.equal(batch.hidden_states[:, :, 1, 2].long(), batch.token_ids)
    assert torch.equal(batch.last_hidden_state[:, :, 0].long(), batch.token_ids)


@pytest.mark.parametrize(("num_rows", "rows_per_batch", "world_size"), [(12, 2, 3), (13, 2, 3), (5, 1, 1), (1, 2, 4)])
def test_ranks_share_all_rows_once_and_take_equally_many_steps(num_rows, rows_per_batch, world_size):
    rows = [Row(index, (f"k{index}",)) for index in range(num_rows)]
    ranks = [
        rank_rows(rows, rows_per_batch=rows_per_batch, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    taken = [row for batches in ranks for batch in batches for row in batch]
    assert sorted(row.index for row in taken if not row.repeated) == list(range(num_rows))
    assert len({row.index for row in taken}) == len(taken)
    assert all(1 <= len(batch) <= rows_per_batch for batches in ranks for batch in batches)
    assert all(
        row.index % world_size == rank for rank, batches in enumerate(ranks) for batch in batches for row in batch
    )


def test_a_repeated_row_is_not_supervised_again():
    batch = collate([(Row(7, ("a",), repeated=True), [sample(3, 10)])], row_tokens=4, epoch=0)
    assert batch.num_supervised_tokens == 0 and batch.num_tokens == 3


class CountAllocations(TorchDispatchMode):
    """Bytes of all tensors that operations made, views not counted."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view() and func.is_view is False:
            given = {value.data_ptr() for value in args if isinstance(value, torch.Tensor)}
            if result.data_ptr() not in given:  # not in place
                self.num_bytes += result.numel() * result.element_size()
        return result


def test_rows_of_64k_tokens_are_filled_and_collated_without_a_second_copy():
    row_tokens, hidden_size, num_layers = 65536, 8, 2
    generator = random.Random(1)
    outlines = [SampleOutline(f"k{n:04d}", generator.randrange(200, 20_000), 100) for n in range(300)]
    outlines.append(SampleOutline("whole", 70_000, 69_000))
    outlines.append(SampleOutline("long", 70_000, 60_000))
    selected, counts = select_samples(outlines, row_tokens=row_tokens)
    assert (counts.skipped_by_truncation, counts.truncated) == (1, 1) and counts.fill_rate > 0.95
    num_tokens = dict(selected)
    row = max(plan_rows(selected, row_tokens=row_tokens, seed=0, epoch=0), key=lambda row: len(row.keys))
    samples = []
    for key in row.keys:
        token_ids = torch.arange(num_tokens[key])
        states = token_ids[:, None].expand(-1, hidden_size).to(torch.bfloat16)
        samples.append(TargetSample(token_ids, token_ids > 9, states[:, None].repeat(1, num_layers, 1), states))
    with CountAllocations() as allocated:
        batch = collate([(row, samples)], row_tokens=row_tokens, epoch=0)
    assert batch.num_tokens == sum(num_tokens[key] for key in row.keys) > 0.9 * row_tokens
    assert int(batch.position_ids.max()) == max(num_tokens[key] for key in row.keys) - 1
    batch_bytes = row_tokens * (3 * 8 + 1 + (num_layers + 1) * hidden_size * 2)
    assert batch_bytes <= allocated.num_bytes < 1.2 * batch_bytes
