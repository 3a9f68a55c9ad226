import itertools
from collections import Counter

import pytest
import torch
from enumeration import WORLDS, World, accepted_tokens, emitted_texts, target_texts, verdict_texts
from toy_language import chi_square_p_value, one_thread  # noqa: F401

from dspark_lab.decoding.verification import (
    Drafts,
    block_acceptance,
    block_weights,
    residual,
    token_acceptance,
    verify,
    verify_block,
    verify_drafts,
    verify_greedy,
    verify_token,
)
from dspark_lab.records import Proposal, Sampling, Verdict

METHODS = {"token": verify_token, "block": verify_block}
P = torch.tensor([0.1, 0.2, 0.3, 0.4])


def whole(world):
    return torch.full((len(world.paths),), world.num_slots)


def causal(world):
    """A length that grows with what was drafted: slot k is verified or not by the drafts before it alone."""
    admitted = torch.ones(len(world.paths), dtype=torch.bool)
    lengths = torch.zeros(len(world.paths), dtype=torch.long)
    for k in range(world.num_slots):
        admitted &= (world.paths[:, :k].sum(-1) + k) % 3 != 2
        lengths += admitted
    return lengths


SCHEDULERS = {
    "whole": whole,
    "causal": causal,
    "one": lambda world: torch.ones(len(world.paths), dtype=torch.long),
    "none": lambda world: torch.zeros(len(world.paths), dtype=torch.long),
}


@pytest.mark.parametrize(
    ("choices", "drafts", "verdict"),
    [
        ([1, 2, 3, 4], [1, 2, 3], Verdict(3, 4)),
        ([1, 2, 3, 4], [1, 0, 3], Verdict(1, 2)),
        ([1, 2, 3, 4], [0, 2, 3], Verdict(0, 1)),
        ([1, 2, 3, 4], [1, 2, 0], Verdict(2, 3)),
        ([4], [], Verdict(0, 4)),
    ],
)
def test_greedy_verdicts(choices, drafts, verdict):
    logits = torch.eye(5)[torch.tensor(choices)]
    proposal = Proposal(torch.tensor(drafts, dtype=torch.long))
    for verification in METHODS:
        assert verify(logits, proposal, sampling=Sampling(), verification=verification) == verdict


def test_greedy_drafts_end_where_each_request_says():
    logits = torch.eye(5)[torch.tensor([[1, 2, 3, 4]] * 4)]
    drafts = Drafts(torch.tensor([[1, 2, 3]] * 4), lengths=torch.tensor([3, 2, 1, 0]))
    verdicts = verify_greedy(logits, drafts)
    assert verdicts.num_accepted.tolist() == [3, 2, 1, 0]
    assert verdicts.bonus_token_ids.tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", WORLDS)
def test_all_paths_together_are_exactly_the_targets_texts(name, method, scheduler):
    world = WORLDS[name]
    emitted = emitted_texts(world, method=method, lengths=SCHEDULERS[scheduler](world))
    torch.testing.assert_close(emitted, target_texts(world), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_length_that_knows_the_last_draft_is_not_exact(method):
    """So the enumeration can fail: here slot 1 is verified only where its own draft is token 0."""
    world = WORLDS["drawn"]
    emitted = emitted_texts(world, method=method, lengths=(world.paths[:, 0] == 0).long())
    assert (emitted - target_texts(world)).abs().max() > 1e-3


@pytest.mark.parametrize("name", WORLDS)
def test_block_verification_accepts_at_least_as_many(name):
    token, block = (accepted_tokens(WORLDS[name], method=method) for method in METHODS)
    assert block >= token - 1e-6
    if name in ("drawn", "reduced vocabulary"):
        assert block > token + 1e-3
    if name == "argmax":  # nothing to gain: a draft never asks for less than the target gives
        assert block == pytest.approx(token, abs=1e-6)


def test_golden_accepted_tokens():
    """algorithms.md 6.3."""
    first, second = torch.tensor([0.3, 0.7]), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    last = torch.full((2, 2, 2), 0.5)
    world = World(
        target=(first, second, last), drafter=(torch.tensor([0.6, 0.4]), torch.tensor([[0.5, 0.5], [0.5, 0.5]]))
    )
    assert accepted_tokens(world, method="token") == pytest.approx(1.28, abs=1e-6)
    assert accepted_tokens(world, method="block") == pytest.approx(1.40, abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", WORLDS)
def test_verdicts_follow_the_exact_distribution(name, method):
    """One batch of drawn paths of different lengths: what each verdict emits, counted."""
    world, num_requests = WORLDS[name], 3000
    generator = torch.Generator().manual_seed(1)
    rows = torch.multinomial(world.path_probabilities(), num_requests, replacement=True, generator=generator)
    drafts = world.drafts(lengths=causal(world), rows=rows)
    verdicts = METHODS[method](world.target_rows()[rows], drafts, generator=generator)
    emitted = Counter()
    for path, accepted, bonus in zip(
        drafts.token_ids.tolist(), verdicts.num_accepted.tolist(), verdicts.bonus_token_ids.tolist(), strict=True
    ):
        emitted[(*path[:accepted], bonus)] += 1
    expected = verdict_texts(world, method=method, lengths=causal(world))
    assert len(expected) > 1
    assert chi_square_p_value(emitted, expected) > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_without_drafts_the_bonus_token_is_drawn_from_p(method):
    nothing = torch.zeros(0, dtype=torch.long)
    logits, generator = P.log()[None], torch.Generator().manual_seed(0)
    for proposal in (Proposal(nothing), Proposal(nothing, torch.zeros(0, 4))):
        verdicts = [
            verify(logits, proposal, sampling=Sampling(1.0), verification=method, generator=generator)
            for _ in range(1000)
        ]
        assert {verdict.num_accepted for verdict in verdicts} == {0}
        counts = Counter(verdict.bonus_token_id for verdict in verdicts)
        assert chi_square_p_value(counts, dict(enumerate(P.tolist()))) > 1e-3


def test_one_request_is_a_batch_without_dimensions():
    world = WORLDS["drawn"]
    drafts = world.drafts(lengths=causal(world), rows=torch.arange(len(world.paths)))
    p = world.target_rows()
    for row in range(len(world.paths)):
        length = int(drafts.lengths[row])
        alone = Drafts(drafts.token_ids[row, :length], drafts.probabilities[row, :length])
        q, batch_q = alone.distributions(3), drafts.distributions(3)[row]
        torch.testing.assert_close(q, batch_q[: length + 1])
        assert not batch_q[length:].any()
        mine = p[row, : length + 1]
        weights = block_weights(mine, q, alone.token_ids)
        accept = block_acceptance(mine, q, weights)
        batch_weights = block_weights(p[row], batch_q, drafts.token_ids[row])
        torch.testing.assert_close(weights, batch_weights[: length + 1])
        torch.testing.assert_close(accept, block_acceptance(p[row], batch_q, batch_weights)[:length])
        if length:
            assert accept[-1] == pytest.approx(float(weights[-1]), abs=1e-6)  # the end of a block: h = w


def test_sampling_is_applied_before_verification():
    """Top-k 1 leaves the argmax alone, whatever the temperature: everything else falls, and it is the bonus token."""
    logits = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    q = torch.full((1, 3), 1 / 3)
    for verification, draft in itertools.product(METHODS, range(3)):
        verdict = verify(
            logits,
            Proposal(torch.tensor([draft]), q),
            sampling=Sampling(temperature=5.0, top_k=1),
            verification=verification,
        )
        assert verdict == (Verdict(1, 0) if draft == 2 else Verdict(0, 2))


def test_a_residual_of_rounding_only_is_p():
    assert torch.equal(residual(P, P), P)
    assert torch.equal(residual(P, P + 1e-9), P)


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_that_is_the_target_has_everything_accepted(method):
    world = WORLDS["same"]
    drafts = world.drafts(lengths=whole(world), rows=torch.arange(len(world.paths)))
    for seed in range(20):
        verdicts = METHODS[method](world.target_rows(), drafts, generator=torch.Generator().manual_seed(seed))
        assert (verdicts.num_accepted == world.num_slots).all()


@pytest.mark.parametrize("method", METHODS)
def test_what_the_target_never_says_is_never_accepted(method):
    p = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    for q in (torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), None):
        for _ in range(20):
            verdicts = METHODS[method](p, Drafts(torch.tensor([0]), q))
            assert (int(verdicts.num_accepted), int(verdicts.bonus_token_ids)) == (0, 1)


def test_a_draft_that_q_denies_is_weighed_without_nan():
    p, q = torch.tensor([[0.5, 0.5], [0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    drafts = torch.tensor([0, 0])
    assert token_acceptance(p, q, drafts).tolist() == [1.0, 0.0]
    assert block_weights(p, q, drafts).tolist() == [1.0, 1.0, 0.0]
    assert block_acceptance(p, q, block_weights(p, q, drafts)).isfinite().all()


def test_low_precision_inputs_are_compared_in_fp32():
    p, q = torch.tensor([[0.5, 0.5]] * 2).bfloat16(), torch.tensor([[0.25, 0.75]]).bfloat16()
    drafts = Drafts(torch.tensor([1]), q)
    accepted = token_acceptance(p, drafts.distributions(2), drafts.token_ids)
    assert accepted.dtype == torch.float32
    assert accepted.tolist() == pytest.approx([2 / 3], abs=1e-7)
    assert block_weights(p, drafts.distributions(2), drafts.token_ids).dtype == torch.float32
    assert residual(p[0], q[0]).dtype == torch.float32


def test_greedy_sampling_ignores_how_drafts_were_drawn():
    logits = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 1.0]])
    drafts = Drafts(torch.tensor([1]), torch.tensor([[0.2, 0.2, 0.6]]))
    verdicts = verify_drafts(logits, drafts, sampling=Sampling(), verification="block")
    assert (int(verdicts.num_accepted), int(verdicts.bonus_token_ids)) == (1, 2)
