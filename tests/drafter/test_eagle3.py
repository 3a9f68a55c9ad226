"""EAGLE-3 against plain loops, and what is its alone."""

from itertools import chain
from typing import Any

import naive_reference as naive
import pytest
import torch
from tiny_world import (
    ROW_TOKENS,
    VOCABULARIES,
    assert_close,
    build,
    context_of,
    document,
    documents,
    logits_of,
    loss_of,
    pack,
    propose,
    target_head,
    tiny_batch,
)

from dspark_lab.decoding.sampling import probabilities
from dspark_lab.drafter.divergences import TERMS
from dspark_lab.drafter.eagle3 import Eagle3
from dspark_lab.drafter.objective import Loss
from dspark_lab.records import Sampling

LAYERS = pytest.mark.parametrize("num_layers", [1, 2])


def eagle3(**overrides) -> Eagle3:
    drafter = build("eagle3", **overrides)
    assert isinstance(drafter, Eagle3)
    return drafter


def assert_same_loss(loss: Loss, *, vocabulary: str = "full", **overrides: Any) -> None:
    """Total, terms and every parameter's gradient of a packed batch are the plain loops' ones."""
    drafter = eagle3(vocabulary=vocabulary, loss=loss, **overrides)
    rows = documents((("0110", "1", "0010111"), ("11111",)))
    weights = {name: p.detach().double().requires_grad_() for name, p in drafter.named_parameters()}
    options = {key: overrides[key] for key in ("norm_before_residual", "norm_output") if key in overrides}
    batch = pack(rows)
    expected, terms = naive.eagle3_loss(
        weights,
        target_head(),
        list(chain(*rows)),
        drafter.objective,
        steps=drafter.ttt_steps,
        draft_ids=VOCABULARIES[vocabulary].draft_to_target.tolist(),
        num_tokens=batch.token_ids.numel(),
        normalizer=loss.normalizer,
        supervision=loss.supervision,
        window=drafter.window_attention,
        **options,
    )
    actual = drafter.loss(drafter(batch), batch)
    assert_close(actual.total, expected)
    assert actual.terms.keys() == terms.keys()
    for name, term in terms.items():
        assert_close(actual.terms[name], term)
    actual.total.backward()
    expected.backward()
    for name, parameter in drafter.named_parameters():
        gradient = weights[name].grad
        assert parameter.grad is not None and gradient is not None, name
        assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("convention", ["paper", "speculators", "deepspec"])
@pytest.mark.parametrize(("num_layers", "vocabulary"), [(1, "full"), (2, "reduced")])
def test_loss_is_the_references(num_layers: int, vocabulary: str, convention: str):
    """Sections 1.4, 3.1 and 4.1 for three training-time-test steps."""
    assert_same_loss(loss_of(convention), vocabulary=vocabulary, num_layers=num_layers)


def test_seven_steps_are_the_references():
    assert_same_loss(loss_of("deepspec"), num_layers=1, ttt_steps=7)


@pytest.mark.parametrize(
    "options",
    [
        {"feature_norm": "joint", "norm_before_residual": True, "norm_output": True},  # Speculators' defaults
        {"feature_norm": "layer", "norm_output": True},  # EAGLE-3.1
        {"qk_norm": True, "norm_before_residual": True},
    ],
    ids=str,
)
def test_norm_options_are_the_references(options: dict[str, Any]):
    assert_same_loss(loss_of(), vocabulary="reduced", **options)


@pytest.mark.parametrize("origin", ["anchor", "query"])
def test_a_window_is_the_references(origin: str):
    window = {"tokens": 3, "origin": origin, "causal": True, "full_layers": (1,)}
    assert_same_loss(loss_of(), window=window)


def test_dpace_over_steps_is_the_references():
    terms = dict.fromkeys(TERMS, 0.5)
    assert_same_loss(loss_of(weighting="dpace", decay=0.4, terms=terms), vocabulary="reduced", num_layers=1)


def test_chains_are_the_slots_with_a_supervised_step():
    """Slot i at step t is fed token i + 1 + t and predicts i + 2 + t: both the assistant's, in one document."""
    drafter, batch = eagle3(), tiny_batch()
    slots, supervised = drafter.chains(batch)
    found = dict(zip(slots.tolist(), supervised.tolist(), strict=True))
    expected, start = {}, 0
    for row, samples in enumerate(documents()):
        start = row * ROW_TOKENS
        for sample in samples:
            mask = sample.loss_mask.tolist()
            for i in range(len(mask)):
                run = []
                for t in range(3):
                    last = i + 2 + t
                    inside = last < len(mask) and mask[last - 1] and mask[last]
                    run.append(bool(inside and all(run)))
                if any(run):
                    expected[start + i] = run
            start += len(mask)
    assert found == expected
    assert sum(map(sum, expected.values())) > 15


def test_output_pairs_each_step_with_its_tokens_and_teacher():
    drafter, batch = eagle3(), tiny_batch()
    slots, _ = drafter.chains(batch)
    with torch.no_grad():
        output = drafter(batch)
    tokens, last = batch.token_ids.flatten(), batch.last_hidden_state.flatten(0, 1)
    for chain_index, t in output.supervised.nonzero().tolist():
        i = int(slots[chain_index])
        assert output.previous_token_ids[chain_index, t] == tokens[i + 1 + t]
        assert output.labels[chain_index, t] == tokens[i + 2 + t]
        assert torch.equal(output.teacher_hidden[chain_index, t], last[i + 1 + t])


EAGLE_3_1 = {"feature_norm": "layer", "norm_output": True}
SPECULATORS = {"feature_norm": "joint", "norm_before_residual": True, "norm_output": True, "qk_norm": True}
WINDOW = {"window": {"tokens": 20, "origin": "query", "causal": True, "full_layers": (1,)}}


@pytest.mark.parametrize(
    "options", [{"num_layers": 1}, {}, EAGLE_3_1, SPECULATORS, WINDOW], ids=["1 layer", "2", "3.1", "normed", "window"]
)
def test_training_time_test_is_autoregression(options: dict[str, Any]):
    """Golden test 6, at every slot of a document that starts inside a row, longer than one attention chunk."""
    drafter = eagle3(**options)
    sample = document("0" + "1" * 139, seed=0)
    with torch.no_grad():
        output = drafter(pack([[document("0110", seed=1), sample]], row_tokens=150))
        q = probabilities(logits_of(drafter, output), Sampling(temperature=1.0))
    first = 1  # the document before has one chain
    for slot in (0, 1, 2, 60, 127, 134):
        forced = sample.token_ids[slot + 2 : slot + 5]
        proposal = propose(
            drafter,
            context_of(sample, anchor=slot + 1),
            num_draft_tokens=3,
            sampling=Sampling(temperature=1.0),
            forced_token_ids=forced,
        )
        assert proposal.probabilities is not None
        assert_close(proposal.probabilities, q[first + slot])


@LAYERS
def test_a_proposal_leaves_no_trace_of_its_drafts(num_layers: int):
    """The cache holds target features only: what was drafted, and how much, does not change the next proposal."""
    drafter, sample = eagle3(num_layers=num_layers), document("0" * 14, seed=2)
    results = []
    for count in (0, 5):
        context = context_of(sample, anchor=6)
        propose(drafter, context, num_draft_tokens=count, sampling=Sampling())
        context.advance(sample.token_ids[6:9], sample.hidden_states[6:9], int(sample.token_ids[9]))
        results.append(
            propose(
                drafter,
                context,
                num_draft_tokens=2,
                sampling=Sampling(temperature=1.0),
                forced_token_ids=sample.token_ids[10:12],
            ).probabilities
        )
        assert all(key.shape[0] == value.shape[0] == 9 for key, value in context.cache)
    assert results[0] is not None and torch.equal(results[0], results[1])


def test_more_may_be_drafted_than_was_trained():
    """Steps beyond ``ttt_steps`` go on in the same way."""
    sample = document("0" * 10, seed=3)
    short, long = eagle3(ttt_steps=2), eagle3(ttt_steps=5)
    proposals = [
        propose(drafter, context_of(sample, anchor=6), num_draft_tokens=5, sampling=Sampling())
        for drafter in (short, long)
    ]
    assert torch.equal(proposals[0].token_ids, proposals[1].token_ids)


def test_loss_of_two_rows_is_the_mean_over_their_weighted_slots():
    drafter, rows = eagle3(loss=loss_of(decay=0.5, terms={"soft_ce": 1.0}, weighting="geometric")), documents()
    with torch.no_grad():
        both = drafter(tiny_batch())
        teacher = drafter.teacher_logits(both.teacher_hidden).softmax(-1)
        per_slot = -(teacher * logits_of(drafter, both).log_softmax(-1)).sum(-1)
        weights = torch.tensor([1.0, 0.5, 0.25]) * both.supervised
        expected = float((weights * per_slot).sum() / weights.sum())
        assert float(drafter.loss(both, tiny_batch()).total) == pytest.approx(expected, rel=1e-5)
        counts = [drafter(pack([row])).supervised.sum(0) for row in rows]
    assert torch.equal(counts[0] + counts[1], both.supervised.sum(0))
