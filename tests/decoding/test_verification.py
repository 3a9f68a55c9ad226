import itertools
from collections import Counter, defaultdict

import pytest
import torch
from toy_language import chi_square_p_value, one_thread  # noqa: F401

from dspark_lab.decoding.verification import (
    acceptance_probabilities,
    residual,
    verify,
    verify_greedy,
    verify_rejection,
)
from dspark_lab.records import Proposal, Sampling, Verdict

P = torch.tensor([0.1, 0.2, 0.3, 0.4])
DRAFT_DISTRIBUTIONS = {
    "same": P,
    "other": torch.tensor([0.4, 0.3, 0.2, 0.1]),
    "reduced vocabulary": torch.tensor([0.0, 0.9, 0.0, 0.1]),
    "uniform": torch.full((4,), 0.25),
    "one-hot": torch.tensor([0.0, 0.0, 1.0, 0.0]),
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
    token_ids = torch.tensor(drafts, dtype=torch.long)
    assert verify_greedy(logits, token_ids) == verdict
    assert verify(logits, Proposal(token_ids), sampling=Sampling()) == verdict


def step_outcomes(p, q):
    """Exact distribution of (draft kept?, emitted token) of one slot, by enumeration of the drafts."""
    outcomes = defaultdict(float)
    for draft in range(len(p)):
        if q[draft] == 0:
            continue
        proposal = Proposal(torch.tensor([draft]), q[None])
        kept = float(acceptance_probabilities(p[None], proposal)[0])
        outcomes[True, draft] += float(q[draft]) * kept
        for token, chance in enumerate(residual(p, q).tolist()):
            outcomes[False, token] += float(q[draft]) * (1 - kept) * chance
    return outcomes


@pytest.mark.parametrize("name", DRAFT_DISTRIBUTIONS)
def test_one_slot_emits_exactly_p(name):
    outcomes = step_outcomes(P, DRAFT_DISTRIBUTIONS[name])
    emitted = torch.zeros(4)
    for (_, token), chance in outcomes.items():
        emitted[token] += chance
    torch.testing.assert_close(emitted, P, rtol=0, atol=1e-6)
    kept = sum(chance for (stands, _), chance in outcomes.items() if stands)
    assert kept == pytest.approx(float(torch.minimum(P, DRAFT_DISTRIBUTIONS[name]).sum()), abs=1e-6)


def test_an_argmax_draft_is_a_one_hot_q():
    one_hot = DRAFT_DISTRIBUTIONS["one-hot"]
    argmax, drawn = Proposal(torch.tensor([2])), Proposal(torch.tensor([2]), one_hot[None])
    assert acceptance_probabilities(P[None], argmax).tolist() == pytest.approx([0.3])
    assert torch.equal(acceptance_probabilities(P[None], argmax), acceptance_probabilities(P[None], drawn))
    torch.testing.assert_close(residual(P, one_hot), torch.tensor([1 / 7, 2 / 7, 0, 4 / 7]))


def test_two_slots_emit_exactly_the_targets_texts():
    generator = torch.Generator().manual_seed(5)
    first, second = (torch.randn(*shape, generator=generator).softmax(-1) for shape in [(3,), (3, 3)])
    q_first, q_second = torch.tensor([0.7, 0.3, 0.0]), torch.randn(3, 3, generator=generator).softmax(-1)
    texts = defaultdict(float)
    for (first_stands, x), chance in step_outcomes(first, q_first).items():
        if first_stands:
            for (_, y), second_chance in step_outcomes(second[x], q_second[x]).items():
                texts[x, y] += chance * second_chance
        else:  # the block ended: the next token comes from the target, as does everything after
            for y in range(3):
                texts[x, y] += chance * float(second[x, y])
    for x, y in itertools.product(range(3), repeat=2):
        assert texts[x, y] == pytest.approx(float(first[x] * second[x, y]), abs=1e-6)


def test_golden_expected_accepted_tokens():
    """algorithms.md 6.3: token-wise rejection accepts 1.28 tokens here (block verification 1.40)."""
    first, second = torch.tensor([0.3, 0.7]), torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    q_first, q_second = torch.tensor([0.6, 0.4]), torch.tensor([0.5, 0.5])
    expected = 0.0
    for x in range(2):
        stands = step_outcomes(first, q_first)[True, x]
        expected += stands * (1 + sum(step_outcomes(second[x], q_second)[True, y] for y in range(2)))
    assert expected == pytest.approx(1.28, abs=1e-6)


@pytest.mark.parametrize("name", DRAFT_DISTRIBUTIONS)
def test_verdicts_follow_the_exact_distribution(name):
    q = DRAFT_DISTRIBUTIONS[name]
    bonus = torch.tensor([0.25, 0.0, 0.75, 0.0])
    expected = {}
    for (stands, token), chance in step_outcomes(P, q).items():
        if stands:  # then the bonus token is drawn from the last row
            expected |= {(1, token, after): chance * float(bonus[after]) for after in (0, 2)}
        else:
            expected[0, token] = expected.get((0, token), 0.0) + chance
    generator, counts = torch.Generator().manual_seed(1), Counter()
    for _ in range(1000):
        draft = torch.multinomial(q, 1, generator=generator)
        proposal = Proposal(draft, None if name == "one-hot" else q[None])
        verdict = verify_rejection(torch.stack([P, bonus]), proposal, generator=generator)
        if verdict.num_accepted:
            counts[1, int(draft), verdict.bonus_token_id] += 1
        else:
            counts[0, verdict.bonus_token_id] += 1
    assert chi_square_p_value(counts, expected) > 1e-3


def test_without_drafts_the_bonus_token_is_drawn_from_p():
    nothing = [
        Proposal(torch.zeros(0, dtype=torch.long)),
        Proposal(torch.zeros(0, dtype=torch.long), torch.zeros(0, 4)),
    ]
    for proposal in nothing:
        generator = torch.Generator().manual_seed(0)
        verdicts = [verify_rejection(P[None], proposal, generator=generator) for _ in range(1000)]
        assert {verdict.num_accepted for verdict in verdicts} == {0}
        counts = Counter(verdict.bonus_token_id for verdict in verdicts)
        assert chi_square_p_value(counts, dict(enumerate(P.tolist()))) > 1e-3


def test_a_residual_of_rounding_only_is_p():
    assert torch.equal(residual(P, P), P)
    assert torch.equal(residual(P, P + 1e-9), P)


def test_what_the_target_never_says_is_never_accepted():
    p = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    for q in (torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), None):
        for _ in range(20):
            assert verify_rejection(p, Proposal(torch.tensor([0]), q)) == Verdict(0, 1)


def test_low_precision_inputs_are_compared_in_fp32():
    p = torch.tensor([[0.5, 0.5]]).bfloat16()
    proposal = Proposal(torch.tensor([1]), torch.tensor([[0.25, 0.75]]).bfloat16())
    accepted = acceptance_probabilities(p, proposal)
    assert accepted.dtype == torch.float32
    assert accepted.tolist() == pytest.approx([2 / 3], abs=1e-7)
    assert residual(p[0], proposal.probabilities[0]).dtype == torch.float32


def test_greedy_sampling_ignores_how_drafts_were_drawn():
    logits = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 1.0]])
    proposal = Proposal(torch.tensor([1]), torch.tensor([[0.2, 0.2, 0.6]]))
    assert verify(logits, proposal, sampling=Sampling()) == Verdict(1, 2)
