import pytest
import torch

from dspark_lab.data.vocabulary import DraftVocabulary, build_draft_vocabulary, count_supervised_tokens
from dspark_lab.records import TokenizedConversation


def counts(frequencies: dict[int, int], vocab_size: int) -> torch.Tensor:
    result = torch.zeros(vocab_size, dtype=torch.int64)
    for token, count in frequencies.items():
        result[token] = count
    return result


def test_golden_mapping_of_the_reference():
    """algorithms.md 11.2, test 9."""
    vocabulary = build_draft_vocabulary(counts({5: 3, 2: 3, 9: 1}, 10), vocab_size=10, draft_vocab_size=4)
    assert vocabulary.draft_to_target.tolist() == [0, 2, 5, 9]
    assert vocabulary.d2t.tolist() == [0, 1, 3, 6]
    assert vocabulary.t2d.nonzero().flatten().tolist() == [0, 2, 5, 9]
    assert (vocabulary.t2d.dtype, vocabulary.d2t.dtype) == (torch.bool, torch.int64)


def test_selection_is_by_count_then_smallest_id():
    """Against the definition: sort by (-count, id), fill with the smallest unused ids."""
    generator = torch.Generator().manual_seed(0)
    token_counts = torch.randint(0, 4, (200,), generator=generator)
    used = [token for token in range(200) if token_counts[token]]
    by_rule = sorted(used, key=lambda token: (-int(token_counts[token]), token))
    by_rule += [token for token in range(200) if token not in used]
    for size in (1, 50, 170, 199):
        built = build_draft_vocabulary(token_counts, vocab_size=200, draft_vocab_size=size)
        assert built.draft_to_target.tolist() == sorted(by_rule[:size])


def test_ids_map_there_and_back():
    vocabulary = build_draft_vocabulary(counts({5: 3, 2: 3, 9: 1}, 10), vocab_size=10, draft_vocab_size=4)
    draft_ids = torch.tensor([[0, 1], [2, 3]])
    target_ids = vocabulary.to_target(draft_ids)
    assert target_ids.tolist() == [[0, 2], [5, 9]]
    assert torch.equal(draft_ids + vocabulary.d2t[draft_ids], target_ids)
    back, inside = vocabulary.to_draft(target_ids)
    assert torch.equal(back, draft_ids) and inside.all()
    outside, inside = vocabulary.to_draft(torch.tensor([1, 5]))
    assert (outside.tolist(), inside.tolist()) == ([0, 2], [False, True])


def test_coverage_is_the_share_of_tokens_inside():
    token_counts = counts({5: 3, 2: 3, 9: 1, 7: 1}, 10)
    assert build_draft_vocabulary(token_counts, vocab_size=10, draft_vocab_size=2).coverage(token_counts) == 6 / 8
    assert DraftVocabulary.full(10).coverage(token_counts) == 1.0
    assert DraftVocabulary.full(10).coverage(torch.zeros(10, dtype=torch.int64)) == 0.0


@pytest.mark.parametrize("draft_vocab_size", [None, 10, 11])
def test_the_full_vocabulary_is_the_identity(draft_vocab_size):
    vocabulary = build_draft_vocabulary(counts({5: 3}, 10), vocab_size=10, draft_vocab_size=draft_vocab_size)
    assert vocabulary.is_full and vocabulary.size == vocabulary.vocab_size == 10
    ids = torch.arange(10)
    assert torch.equal(vocabulary.to_target(ids), ids) and torch.equal(vocabulary.to_draft(ids)[0], ids)
    assert vocabulary.t2d.all() and not vocabulary.d2t.any()


def test_only_supervised_tokens_are_counted():
    conversations = [
        TokenizedConversation("a", torch.tensor([1, 2, 2, 3]), torch.tensor([False, True, True, True])),
        TokenizedConversation("b", torch.tensor([3, 1]), torch.tensor([True, False])),
    ]
    assert count_supervised_tokens(conversations, vocab_size=5).tolist() == [0, 0, 2, 2, 0]


def test_what_does_not_fit_the_target_is_refused():
    foreign = TokenizedConversation("f", torch.tensor([1, 7]), torch.tensor([True, True]))
    with pytest.raises(ValueError, match="conversation 'f' has token 7, outside"):
        count_supervised_tokens([foreign], vocab_size=5)
    with pytest.raises(ValueError, match="draft_vocab_size=0"):
        build_draft_vocabulary(counts({}, 10), vocab_size=10, draft_vocab_size=0)
    with pytest.raises(ValueError, match="token_counts has shape"):
        build_draft_vocabulary(counts({}, 9), vocab_size=10, draft_vocab_size=4)
    with pytest.raises(ValueError, match=r"2\.\.10 leave the target's vocabulary of 10"):
        DraftVocabulary.of(torch.tensor([2, 10]), vocab_size=10)
    with pytest.raises(ValueError, match="ascending list of distinct"):
        DraftVocabulary.of(torch.tensor([3, 3]), vocab_size=10)
