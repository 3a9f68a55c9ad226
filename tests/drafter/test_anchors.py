"""Where blocks start and what they hold, against loops over documents."""

import pytest
import torch
from tiny_world import ALL, ROW_TOKENS, SPEC, document, documents, pack, rows_of, tiny_batch

from dspark_lab.drafter.anchors import gather_blocks, sample_anchors, supervised_pairs
from dspark_lab.records import Batch

LAYOUTS = pytest.mark.parametrize("sample_from_anchor", [True, False], ids=["anchor-first", "1+N"])


def naive_pairs(batch: Batch) -> list[int]:
    found = []
    for row in range(batch.token_ids.shape[0]):
        for i in range(ROW_TOKENS - 1):
            both = bool(batch.loss_mask[row, i]) and bool(batch.loss_mask[row, i + 1])
            if both and batch.document_ids[row, i] == batch.document_ids[row, i + 1]:
                found.append(row * ROW_TOKENS + i)
    return found


def test_pairs_are_neighbours_of_one_document_that_the_assistant_wrote():
    batch = tiny_batch()
    expected = naive_pairs(batch)
    assert supervised_pairs(batch).nonzero().flatten().tolist() == expected
    # "00111011", "1111", "0", "001101" | "0000", "0011111111", "000001"
    assert expected == [2, 3, 6, 8, 9, 10, 15, *range(24 + 6, 24 + 13)]


def test_pairs_do_not_join_the_end_of_a_row_with_the_next_row():
    whole = [[document("1" * ROW_TOKENS, seed=0)], [document("1" * ROW_TOKENS, seed=1)]]
    pairs = supervised_pairs(pack(whole))
    assert not pairs[ROW_TOKENS - 1] and not pairs[-1]
    assert int(pairs.sum()) == 2 * (ROW_TOKENS - 1)


def long_batch(*, epoch: int = 0) -> Batch:
    return pack([[document("1" * ROW_TOKENS, seed=n)] for n in range(3)], epoch=epoch)


def anchors_by_row(batch: Batch, **overrides) -> dict[int, list[int]]:
    drawn = sample_anchors(batch, supervised_pairs(batch), **{"num_anchors": 6, "seed": 5, **overrides})
    return {
        row_id: [a - index * ROW_TOKENS for a in drawn.tolist() if a // ROW_TOKENS == index]
        for index, row_id in enumerate(batch.row_ids)
    }


def test_a_draw_is_sorted_distinct_and_eligible():
    batch = tiny_batch()
    drawn = sample_anchors(batch, supervised_pairs(batch), num_anchors=3, seed=0).tolist()
    assert drawn == sorted(set(drawn))
    assert set(drawn) <= set(naive_pairs(batch))
    assert [sum(a // ROW_TOKENS == row for a in drawn) for row in (0, 1)] == [3, 3]
    assert sample_anchors(batch, supervised_pairs(batch), num_anchors=ALL, seed=0).tolist() == naive_pairs(batch)


def test_a_draw_depends_on_seed_epoch_and_row_alone():
    together = anchors_by_row(long_batch())
    assert anchors_by_row(rows_of(long_batch(), [2, 0, 1])) == together
    for index, row_id in enumerate(long_batch().row_ids):
        assert anchors_by_row(rows_of(long_batch(), [index])) == {row_id: together[row_id]}
    assert anchors_by_row(long_batch()) == together
    assert anchors_by_row(long_batch(epoch=1)) != together
    assert anchors_by_row(long_batch(), seed=6) != together
    assert together[40] != together[41]


def test_every_candidate_is_drawn_about_equally_often():
    counts = torch.zeros(ROW_TOKENS)
    rounds = 400
    for epoch in range(rounds):
        batch = pack([[document("1" * ROW_TOKENS, seed=0)]], epoch=epoch)
        counts[sample_anchors(batch, supervised_pairs(batch), num_anchors=6, seed=0)] += 1
    expected = rounds * 6 / (ROW_TOKENS - 1)
    deviation = (expected * (1 - 6 / (ROW_TOKENS - 1))) ** 0.5
    assert (counts[:-1] - expected).abs().max() < 4 * deviation
    assert counts[-1] == 0


def test_no_candidates_give_no_anchors():
    batch = pack([[document("0000", seed=0)]])
    assert sample_anchors(batch, supervised_pairs(batch), num_anchors=4, seed=0).shape == (0,)


@LAYOUTS
@pytest.mark.parametrize("block_size", [2, 5, 30])
def test_blocks_equal_the_loop_over_documents(sample_from_anchor: bool, block_size: int):
    """Blocks of 30 run over the end of the row and of the batch."""
    batch = tiny_batch()
    anchors = sample_anchors(batch, supervised_pairs(batch), num_anchors=ALL, seed=0)
    blocks = gather_blocks(
        batch,
        anchors,
        block_size=block_size,
        mask_token_id=SPEC.mask_token_id,
        sample_from_anchor=sample_from_anchor,
        supervision="drafted",
    )
    row = 0
    for r, samples in enumerate(documents()):
        start = r * ROW_TOKENS
        for sample in samples:
            tokens, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
            for p in (p for p in range(len(tokens) - 1) if mask[p] and mask[p + 1]):
                assert anchors[row] == start + p
                assert blocks.token_ids[row].tolist() == [tokens[p]] + [SPEC.mask_token_id] * (block_size - 1)
                assert blocks.position_ids[row].tolist() == list(range(p, p + block_size))
                places = slice(row * block_size, (row + 1) * block_size)
                assert blocks.visibility.lower[places].tolist() == [start] * block_size
                assert blocks.visibility.upper[places].tolist() == [start + p] * block_size
                first = 1 if sample_from_anchor else 0
                alive = True
                for slot in range(block_size if sample_from_anchor else block_size - 1):
                    label = p + 1 + slot if first else p + slot + 1
                    alive = alive and label < len(tokens) and mask[label]
                    assert bool(blocks.supervised[row, slot]) == alive
                    if alive:
                        assert blocks.labels[row, slot] == tokens[label]
                        assert blocks.previous_token_ids[row, slot] == tokens[label - 1]
                        assert blocks.teacher[row, slot] == start + label - 1
                row += 1
            start += len(tokens)
    assert row == len(anchors)
    assert blocks.visibility.group_size == block_size


@LAYOUTS
def test_previous_tokens(sample_from_anchor: bool):
    """Golden test 10: anchor-first slot k follows x_(p+k); 1 + N slot k follows x_(p+k-1), the shifted list."""
    sample = document("0111111", seed=0)
    batch = pack([[sample]])
    blocks = gather_blocks(
        batch,
        torch.tensor([2]),
        block_size=4,
        mask_token_id=28,
        sample_from_anchor=sample_from_anchor,
        supervision="drafted",
    )
    x = sample.token_ids.tolist()
    if sample_from_anchor:
        assert blocks.previous_token_ids.tolist() == [[x[2], x[3], x[4], x[5]]]
        assert blocks.labels.tolist() == [[x[3], x[4], x[5], x[6]]]
    else:  # [b0, b0, b1, b2] of the reference without slot 0, which predicts nothing
        assert blocks.previous_token_ids.tolist() == [[x[2], x[3], x[4]]]
        assert blocks.labels.tolist() == [[x[3], x[4], x[5]]]
