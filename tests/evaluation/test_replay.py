from collections import Counter
from dataclasses import replace

import pytest
import torch
from enumeration import WORLDS, texts_and_accepted
from toy_language import (
    DRAFTERS,
    EOS,
    ArgmaxDrafter,
    TableDrafter,
    ToyTarget,
    ToyVerifier,
    homogeneity_p_value,
    one_thread,  # noqa: F401
    random_table,
    toy_drafters,
)

from dspark_lab.decoding.loop import plain_decode, speculative_decode
from dspark_lab.evaluation import replay as replay_module
from dspark_lab.evaluation.replay import answer_span, evaluate_replay, keeping, refusal, replay
from dspark_lab.records import Sampling, TokenizedConversation

GREEDY = Sampling(max_new_tokens=24)
PROMPTS = [(a, b) for a in range(1, 5) for b in range(1, 5)]
TABLE = random_table(8, seed=3)


def conversation_of(sample, *, sampling, conversation_id="c"):
    return TokenizedConversation(conversation_id, sample.token_ids, sample.loss_mask, "toy", sampling)


def replayed(table, drafter, sample, *, sampling, num_draft_tokens=4, recorded_sampling=None, **options):
    return replay(
        drafter,
        sample,
        conversation_of(sample, sampling=recorded_sampling or sampling),
        sampling=sampling,
        num_draft_tokens=num_draft_tokens,
        target_head=ToyTarget(table).head(),
        eos_token_ids=(EOS,),
        **options,
    )


def decoded(table, drafter, prompt_ids, *, sampling, num_draft_tokens=4, **options):
    return speculative_decode(
        ToyVerifier(table),
        drafter,
        torch.tensor(prompt_ids),
        sampling=sampling,
        num_draft_tokens=num_draft_tokens,
        eos_token_ids=(EOS,),
        **options,
    )


def recorded(table, prompt_ids, *, sampling, generator=None):
    """A conversation as capture stores it: the target's own answer to ``prompt_ids``."""
    answer = plain_decode(
        ToyVerifier(table),
        torch.tensor(prompt_ids),
        sampling=sampling,
        eos_token_ids=(EOS,),
        generator=generator or torch.Generator().manual_seed(0),
    ).token_ids
    return ToyTarget(table).sample([*prompt_ids, *answer], prompt_length=len(prompt_ids))


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_replay_is_decoding_step_by_step(name, num_draft_tokens):
    for prompt_ids in PROMPTS:
        sample = recorded(TABLE, prompt_ids, sampling=GREEDY)
        ours = replayed(TABLE, toy_drafters(TABLE)[name], sample, sampling=GREEDY, num_draft_tokens=num_draft_tokens)
        real = decoded(TABLE, toy_drafters(TABLE)[name], prompt_ids, sampling=GREEDY, num_draft_tokens=num_draft_tokens)
        assert ours.steps == real.steps
        assert ours.num_new_tokens == len(real.token_ids)
        assert (ours.prompt_id, ours.domain) == ("c", "toy")


@pytest.mark.parametrize("limit", [1, 2, 5, 11])
def test_an_answer_longer_than_asked_is_cut_as_decoding_cuts_it(limit):
    table = random_table(8, eos_bias=-50.0)
    drafter, shorter = toy_drafters(table)["noisy"], Sampling(max_new_tokens=limit)
    sample = recorded(table, (1, 2), sampling=GREEDY)
    ours = replayed(table, drafter, sample, sampling=shorter, recorded_sampling=GREEDY)
    assert ours.steps == decoded(table, drafter, (1, 2), sampling=shorter).steps
    assert ours.num_new_tokens == limit


def test_an_answer_ends_after_its_first_end_token():
    sample = ToyTarget(TABLE).sample([1, 2, 3, 4, EOS, 5, 6, EOS], prompt_length=2)
    assert replayed(TABLE, TableDrafter(TABLE), sample, sampling=GREEDY).num_new_tokens == 3


def test_only_the_last_answer_is_replayed():
    table = random_table(8, eos_bias=-50.0)
    sample = recorded(table, (1, 2, 3, 4, 5, 6), sampling=GREEDY)
    sample.loss_mask[2:4] = True  # an earlier turn's answer
    drafter = toy_drafters(table)["noisy"]
    ours = replayed(table, drafter, sample, sampling=GREEDY)
    assert ours.steps == decoded(table, drafter, (1, 2, 3, 4, 5, 6), sampling=GREEDY).steps
    assert ours.steps[0].position == 6


SAMPLING = Sampling(temperature=0.9, top_k=3, max_new_tokens=5)
SMALL = random_table(4, seed=8, eos_bias=-0.5)


def accepted_counts(steps):
    return tuple(step.num_accepted for step in steps)


def both_ways(name, *, runs=250, record_at=SAMPLING, drafter=None, **options):
    """Accepted counts per step of whole answers: replayed, and really decoded."""
    drafter = drafter or toy_drafters(SMALL)[name]
    generator = torch.Generator().manual_seed(0)
    ours, real = Counter(), Counter()
    for _ in range(runs):
        sample = recorded(SMALL, (1, 2), sampling=record_at, generator=generator)
        trace = replayed(
            SMALL, drafter, sample, sampling=SAMPLING, recorded_sampling=SAMPLING, num_draft_tokens=2,
            generator=generator, **options,
        )  # fmt: skip
        ours[accepted_counts(trace.steps)] += 1
        steps = decoded(
            SMALL, drafter, (1, 2), sampling=SAMPLING, num_draft_tokens=2, generator=generator, **options
        ).steps
        real[accepted_counts(steps)] += 1
    return ours, real


def acceptance_length(counts):
    steps = sum(len(accepted) * times for accepted, times in counts.items())
    return 1 + sum(sum(accepted) * times for accepted, times in counts.items()) / steps


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("name", WORLDS)
def test_every_text_keeps_as_many_tokens_as_decoding_that_wrote_it(name, verification):
    """Exactly: P(n accepted | text) over all drafts, against the product of what replay keeps of the text alone."""
    world = WORLDS[name]
    lengths = torch.full((len(world.paths),), world.num_slots)
    joint = texts_and_accepted(world, method=verification, lengths=lengths)
    for text in torch.cartesian_prod(*[torch.arange(world.vocab_size)] * (world.num_slots + 1)).tolist():
        chance = joint[tuple(text)].sum()
        if chance < 1e-9:
            continue
        p, q = (
            torch.tensor([float(rows[k][tuple(text[: k + 1])]) for k in range(world.num_slots)])
            for rows in (world.target, world.drafter)
        )
        survival = keeping(p, q, verification=verification).clamp_max(1.0).cumprod(-1)
        at_least = (joint[tuple(text)] / chance).flip(-1).cumsum(-1).flip(-1)[1:]
        torch.testing.assert_close(survival.double(), at_least, rtol=0, atol=1e-5)


def test_replay_of_blocks_has_the_distribution_of_decoding():
    ours, real = both_ways("noisy", verification="block")
    assert homogeneity_p_value(ours, real) > 1e-3
    assert acceptance_length(ours) == pytest.approx(acceptance_length(real), abs=0.12)


@pytest.mark.parametrize("name", ["noisy", "slots", "reduced", "truncated"])
def test_sampled_replay_has_the_distribution_of_decoding(name):
    ours, real = both_ways(name)
    assert len(real) > 8
    assert homogeneity_p_value(ours, real) > 1e-3
    assert acceptance_length(ours) == pytest.approx(acceptance_length(real), abs=0.12)


def test_argmax_drafts_against_sampled_answers_have_the_distribution_of_decoding():
    ours, real = both_ways("noisy", draft_greedily=True)
    assert homogeneity_p_value(ours, real) > 1e-3
    assert ours != Counter({(): ours[()]})


def test_the_comparison_sees_answers_recorded_at_another_temperature():
    ours, real = both_ways("noisy", record_at=replace(SAMPLING, temperature=0.2))
    assert homogeneity_p_value(ours, real) < 1e-3


def test_a_perfect_drafter_keeps_every_sampled_token():
    table = random_table(8, eos_bias=-50.0)
    sampling = Sampling(temperature=1.0, max_new_tokens=16)
    sample = recorded(table, (1, 2), sampling=sampling)
    trace = replayed(table, TableDrafter(table), sample, sampling=sampling)
    assert accepted_counts(trace.steps) == (4, 4, 4)


def test_a_token_outside_the_draft_vocabulary_is_never_kept():
    sample = ToyTarget(TABLE).sample([1, 2, 3, 5, 3, 5, 3], prompt_length=2)
    sampling = Sampling(temperature=1.0, max_new_tokens=5)
    drafter = TableDrafter(torch.zeros(8, 8, 8), known_tokens=(0, 1, 3))
    for _ in range(20):
        trace = replayed(TABLE, drafter, sample, sampling=sampling, num_draft_tokens=1)
        # Anchors 3: the draft would have to be 5, which q does not know.
        assert all(step.num_accepted == 0 for step in trace.steps if step.position % 2 == 0)


def test_forced_tokens_are_the_recorded_ones_padded_with_the_last():
    table = random_table(8, eos_bias=-50.0)
    sampling = Sampling(temperature=1.0, max_new_tokens=6)
    sample = recorded(table, (1, 2), sampling=sampling)
    answer = sample.token_ids[2:].tolist()
    drafter = TableDrafter(table, max_drafts=lambda position: 3)
    trace = replayed(table, drafter, sample, sampling=sampling, num_draft_tokens=4)
    assert drafter.forced == [answer[1:5], [answer[5]] * 4]
    assert [(step.num_draft_tokens, step.num_accepted) for step in trace.steps] == [(3, 3), (3, 0)]


def test_long_answers_are_scored_in_chunks(monkeypatch):
    sampling = Sampling(temperature=1.0, max_new_tokens=60)
    table = random_table(8, eos_bias=-50.0)
    sample = recorded(table, (1, 2), sampling=sampling)
    traces = []
    for chunk in (7, 10_000):
        monkeypatch.setattr("dspark_lab.evaluation.replay.CHUNK_TOKENS", chunk)
        drafter, generator = toy_drafters(table)["noisy"], torch.Generator().manual_seed(0)
        traces.append(replayed(table, drafter, sample, sampling=sampling, generator=generator))
    assert traces[0] == traces[1]
    assert len(set(accepted_counts(traces[0].steps))) > 2


def test_states_may_be_stored_in_half_precision():
    sampling = Sampling(temperature=1.0, max_new_tokens=16)
    sample = recorded(TABLE, (1, 2), sampling=sampling)
    halved = replace(
        sample,
        hidden_states=sample.hidden_states.bfloat16(),
        last_hidden_state=sample.last_hidden_state.bfloat16(),
    )
    traces = [
        replayed(
            TABLE, toy_drafters(TABLE)["noisy"], each, sampling=sampling, generator=torch.Generator().manual_seed(1)
        )
        for each in (sample, halved)
    ]
    assert traces[0] == traces[1]


def test_a_drafter_without_probabilities_is_told_how_to_be_replayed():
    sampling = Sampling(temperature=1.0, max_new_tokens=5)
    sample = ToyTarget(TABLE).sample([1, 2, 3, 5, 3, 5, 3], prompt_length=2)

    class Forced(ArgmaxDrafter):
        def propose(self, contexts, *, num_draft_tokens, sampling, generator=None, forced_token_ids=None):
            proposal = super().propose(contexts, num_draft_tokens=num_draft_tokens, sampling=sampling)
            return replace(proposal, token_ids=forced_token_ids)

    with pytest.raises(ValueError, match="draft_greedily=True"):
        replayed(TABLE, Forced(TABLE), sample, sampling=sampling)
    with pytest.raises(AssertionError, match="forced tokens"):
        replayed(TABLE, ArgmaxDrafter(-TABLE), sample, sampling=sampling)
    assert replayed(TABLE, ArgmaxDrafter(TABLE), sample, sampling=sampling, draft_greedily=True).steps


HOT = Sampling(temperature=1.0)
REFUSALS = [
    (None, [False, True], GREEDY, "no sampling recorded"),
    (HOT, [False, True], GREEDY, "recorded at another sampling"),
    (GREEDY, [False, True], HOT, "recorded at another sampling"),
    (HOT, [False, True], replace(HOT, top_p=0.9), "recorded at another sampling"),
    (GREEDY, [False, False], GREEDY, "no answer"),
    (GREEDY, [True, True], GREEDY, "no prompt before the answer"),
    (replace(HOT, max_new_tokens=3), [False, True], replace(HOT, max_new_tokens=9), None),
]


@pytest.mark.parametrize(("recorded_at", "loss_mask", "asked", "reason"), REFUSALS)
def test_refusals(recorded_at, loss_mask, asked, reason):
    sample = replace(ToyTarget(TABLE).sample([1, 2], prompt_length=1), loss_mask=torch.tensor(loss_mask))
    conversation = conversation_of(sample, sampling=recorded_at)
    assert refusal(conversation, sample.loss_mask, sampling=asked) == reason
    options = {"num_draft_tokens": 2, "target_head": ToyTarget(TABLE).head(), "eos_token_ids": (EOS,)}
    if reason is None:
        assert replay(TableDrafter(TABLE), sample, conversation, sampling=asked, **options).num_new_tokens == 1
        return
    with pytest.raises(ValueError, match=f"'c' cannot be replayed .*{reason}.*regenerate"):
        replay(TableDrafter(TABLE), sample, conversation, sampling=asked, **options)


@pytest.mark.parametrize(
    ("mask", "span"), [("0011", (2, 4)), ("0110", (1, 3)), ("1101", (3, 4)), ("111", (0, 3)), ("01010", (3, 4))]
)
def test_answer_span(mask, span):
    assert answer_span(torch.tensor([bit == "1" for bit in mask])) == span


def stored(*, sampling):
    samples = [recorded(TABLE, prompt_ids, sampling=sampling) for prompt_ids in PROMPTS[:4]]
    conversations = [
        conversation_of(sample, sampling=sampling, conversation_id=str(index)) for index, sample in enumerate(samples)
    ]
    store = {each.key: sample for each, sample in zip(conversations, samples, strict=True)}
    return conversations, store


def evaluated(conversations, store, *, sampling, **options):
    options = {"seed": 0, "num_draft_tokens": 3, **options}
    return evaluate_replay(
        toy_drafters(TABLE)["noisy"],
        store.__getitem__,
        conversations,
        sampling=sampling,
        target_head=ToyTarget(TABLE).head(),
        eos_token_ids=(EOS,),
        **options,
    )


def test_conversations_are_replayed_and_refusals_counted():
    conversations, store = stored(sampling=GREEDY)
    others = [replace(conversations[0], sampling=sampling) for sampling in (None, HOT, HOT)]
    seen = []

    def progress(items, description):
        seen.append((len(items), description))
        return items

    result = evaluated([*others, *conversations], store, sampling=GREEDY, progress=progress)
    assert [trace.prompt_id for trace in result.traces] == ["0", "1", "2", "3"]
    assert result.refused == {"no sampling recorded": 1, "recorded at another sampling": 2}
    assert seen == [(7, "replay")]


def test_a_conversations_random_numbers_do_not_depend_on_the_others():
    conversations, store = stored(sampling=HOT)
    together = evaluated(conversations, store, sampling=HOT).traces
    alone = [evaluated([each], store, sampling=HOT).traces[0] for each in conversations]
    assert together == tuple(alone)
    assert evaluated(conversations, store, sampling=HOT, seed=1).traces != together


@pytest.mark.parametrize(
    ("limit", "value", "most"), [("TOGETHER", 3, 3), ("TOGETHER", 99, 4), ("TOGETHER_TOKENS", 1, 1)]
)
def test_what_is_held_at_once_is_limited_and_changes_nothing(
    limit: str, value: int, most: int, monkeypatch: pytest.MonkeyPatch
):
    conversations, store = stored(sampling=HOT)
    expected, widths = evaluated(conversations, store, sampling=HOT), []
    propose = TableDrafter.propose

    def counting(self, contexts, **options):
        widths.append(len(contexts))
        return propose(self, contexts, **options)

    monkeypatch.setattr(TableDrafter, "propose", counting)
    monkeypatch.setattr(replay_module, limit, value)
    assert evaluated(conversations, store, sampling=HOT) == expected
    assert max(widths) == most


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_what_a_drafter_refuses_is_its_own_words(sampling: Sampling, monkeypatch: pytest.MonkeyPatch):
    def refuse(self, contexts, *, num_draft_tokens, **options):
        raise ValueError(f"num_draft_tokens={num_draft_tokens} but")

    monkeypatch.setattr(TableDrafter, "propose", refuse)
    conversations, store = stored(sampling=sampling)
    with pytest.raises(ValueError, match="num_draft_tokens=-1 but"):
        evaluated(conversations, store, sampling=sampling, num_draft_tokens=-1)


def test_nothing_to_replay_is_an_error_that_says_why():
    conversations, store = stored(sampling=GREEDY)
    with pytest.raises(ValueError, match=r"none of 4 .*'recorded at another sampling': 4"):
        evaluated(conversations, store, sampling=HOT)
    with pytest.raises(ValueError, match="none of 0"):
        evaluated([], store, sampling=GREEDY)
