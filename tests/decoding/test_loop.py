from collections import Counter

import pytest
import torch
from toy_language import (
    DRAFTERS,
    EOS,
    ArgmaxDrafter,
    TableDrafter,
    ToyVerifier,
    chi_square_p_value,
    one_thread,  # noqa: F401
    random_table,
    sequence_probabilities,
    toy_drafters,
)

from dspark_lab.decoding.loop import cut, plain_decode, speculative_decode
from dspark_lab.records import Sampling

PROMPT = torch.tensor([1, 2])
GREEDY = Sampling(max_new_tokens=24)
PROMPTS = [torch.tensor([a, b]) for a in range(1, 5) for b in range(1, 5)]


def speculate(table, drafter, prompt_ids=PROMPT, *, sampling=GREEDY, num_draft_tokens=4, verifier=None, **options):
    return speculative_decode(
        verifier or ToyVerifier(table),
        drafter,
        prompt_ids,
        sampling=sampling,
        num_draft_tokens=num_draft_tokens,
        eos_token_ids=(EOS,),
        **options,
    )


def plain(table, prompt_ids=PROMPT, *, sampling=GREEDY, generator=None):
    return plain_decode(
        ToyVerifier(table), prompt_ids, sampling=sampling, eos_token_ids=(EOS,), generator=generator
    ).token_ids


def assert_accounted(decoded, *, prompt_length=2):
    """The first token comes from the prefill, every step emits num_accepted + 1, anchors follow each other."""
    position = prompt_length
    for step in decoded.steps:
        assert step.position == position
        assert 0 <= step.num_accepted <= step.num_draft_tokens
        position += step.num_accepted + 1
    assert position + 1 - prompt_length == len(decoded.token_ids)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_the_targets_own(name, num_draft_tokens):
    table = random_table(8, seed=3)
    lengths = set()
    for prompt_ids in PROMPTS:
        decoded = speculate(table, toy_drafters(table)[name], prompt_ids, num_draft_tokens=num_draft_tokens)
        assert decoded.token_ids == plain(table, prompt_ids)
        assert_accounted(decoded)
        lengths.add(len(decoded.token_ids))
    assert len(lengths) > 2 and GREEDY.max_new_tokens in lengths  # some ended by EOS, some at the limit


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
def test_a_perfect_drafter_has_everything_accepted(num_draft_tokens):
    table = random_table(8, eos_bias=-50.0)
    limit = 1 + 5 * (num_draft_tokens + 1)
    for sampling in (Sampling(max_new_tokens=limit), Sampling(temperature=1.0, max_new_tokens=limit)):
        decoded = speculate(table, TableDrafter(table), sampling=sampling, num_draft_tokens=num_draft_tokens)
        assert [step.num_accepted for step in decoded.steps] == [num_draft_tokens] * 5
        assert len(decoded.token_ids) == limit


def test_a_wrong_drafter_has_nothing_accepted():
    table = random_table(8, eos_bias=-50.0)
    decoded = speculate(table, TableDrafter(-table))
    assert [step.num_accepted for step in decoded.steps] == [0] * (GREEDY.max_new_tokens - 1)
    assert {step.num_draft_tokens for step in decoded.steps} == {4}


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_the_last_step_is_cut_at_max_new_tokens(limit):
    table = random_table(8, eos_bias=-50.0)
    decoded = speculate(table, TableDrafter(table), sampling=Sampling(max_new_tokens=limit))
    assert decoded.token_ids == plain(table)[:limit]
    accepted = {1: [], 2: [0], 3: [1], 7: [4, 0]}
    assert [step.num_accepted for step in decoded.steps] == accepted[limit]
    assert {step.num_draft_tokens for step in decoded.steps} <= {4}  # full width to the end


@pytest.mark.parametrize("end_at", [1, 2, 4, 6, 7])
def test_the_last_step_is_cut_after_the_end_token(end_at):
    """Tokens 1, 2, 3 ... follow each other; the end token comes ``end_at`` tokens after the prompt, then 1 again."""
    table = torch.zeros(12, 12, 12)
    for token in range(11):
        table[:, token, token + 1] = 5.0
    table[:, end_at, :] = 0.0
    table[:, end_at, EOS] = 5.0
    decoded = speculate(table, TableDrafter(table), torch.tensor([1, 1]), num_draft_tokens=3)
    assert decoded.token_ids == (*range(2, end_at + 1), EOS)
    assert_accounted(decoded)
    emitted = [step.num_accepted + 1 for step in decoded.steps]
    assert emitted == [min(4, end_at - 1 - done) for done in range(0, end_at - 1, 4)]


def test_the_cache_keeps_what_was_accepted():
    table = random_table(8, eos_bias=-50.0)
    verifier = ToyVerifier(table)
    decoded = speculate(table, toy_drafters(table)["noisy"], verifier=verifier)
    assert len({step.num_accepted for step in decoded.steps}) > 1
    text = [*PROMPT.tolist(), *decoded.token_ids]
    assert verifier.token_ids[: len(text) - 1] == text[:-1]


def test_steps_carry_the_confidence_of_the_whole_block():
    table = random_table(8)
    decoded = speculate(table, TableDrafter(table, max_drafts=lambda position: 2))
    assert decoded.steps
    for step in decoded.steps:
        assert step.num_draft_tokens == 2
        assert step.confidence == (1.0, 1.0)


SAMPLING = Sampling(temperature=0.9, max_new_tokens=3)
SMALL = random_table(3, seed=8, eos_bias=-0.5)


def sampled_texts(drafter, *, runs, **options):
    generator = torch.Generator().manual_seed(0)
    return Counter(
        speculate(SMALL, drafter, sampling=SAMPLING, num_draft_tokens=2, generator=generator, **options).token_ids
        for _ in range(runs)
    )


@pytest.mark.parametrize(
    ("name", "verification"), [*((name, "token") for name in DRAFTERS), ("noisy", "block"), ("truncated", "block")]
)
def test_sampled_texts_follow_the_target(name, verification):
    counts = sampled_texts(toy_drafters(SMALL)[name], runs=400, verification=verification)
    assert chi_square_p_value(counts, sequence_probabilities(SMALL, (1, 2), SAMPLING)) > 1e-3


@pytest.mark.parametrize(
    ("drafter", "options"),
    [(TableDrafter(SMALL.flip(-1)), {"draft_greedily": True}), (ArgmaxDrafter(SMALL.flip(-1)), {})],
)
def test_argmax_drafts_leave_the_sampled_texts_alone(drafter, options):
    counts = sampled_texts(drafter, runs=400, **options)
    assert chi_square_p_value(counts, sequence_probabilities(SMALL, (1, 2), SAMPLING)) > 1e-3


def test_plainly_sampled_texts_follow_the_target_and_the_test_can_fail():
    generator = torch.Generator().manual_seed(0)
    counts = Counter(plain(SMALL, sampling=SAMPLING, generator=generator) for _ in range(400))
    assert chi_square_p_value(counts, sequence_probabilities(SMALL, (1, 2), SAMPLING)) > 1e-3
    hotter = Sampling(temperature=1.3, max_new_tokens=3)
    assert chi_square_p_value(counts, sequence_probabilities(SMALL, (1, 2), hotter)) < 1e-3


def test_a_generator_makes_sampled_decoding_repeatable():
    table = random_table(8)
    sampling = Sampling(temperature=1.0, max_new_tokens=24)
    texts = [
        speculate(table, toy_drafters(table)["noisy"], sampling=sampling, generator=torch.Generator().manual_seed(seed))
        for seed in (4, 4, 5)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(("max_tokens", "kept"), [(9, [3, 1, 0]), (3, [3, 1, 0]), (2, [3, 1]), (1, [3])])
def test_cut(max_tokens, kept):
    assert cut([3, 1, 0, 2, 0], max_tokens=max_tokens, eos_token_ids={0}) == kept
    assert cut([3, 1, 0, 2, 0], max_tokens=max_tokens, eos_token_ids=()) == [3, 1, 0, 2, 0][:max_tokens]
