"""DFlash and DSpark against plain loops, and what is theirs alone."""

import math
from typing import Any

import naive_reference as naive
import pytest
import torch
from tiny_world import (
    DRAFTERS,
    ROW_TOKENS,
    SPEC,
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
    recipe,
    target_head,
    tiny_batch,
)
from torch import Tensor

from dspark_lab.drafter.base import Borrowed, Drafter
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.divergences import TERMS
from dspark_lab.drafter.dspark import DSpark
from dspark_lab.drafter.objective import Loss
from dspark_lab.records import Sampling

BLOCK_DRAFTERS = pytest.mark.parametrize("name", ["dflash", "dspark"])
BOTH_VOCABULARIES = pytest.mark.parametrize("vocabulary", VOCABULARIES)
ROWS = (("0110", "1", "00101111"), ("111011",))  # short documents: the loops are slow


def exact_weights(drafter: Drafter) -> dict[str, Tensor]:
    return {name: p.detach().double().requires_grad_() for name, p in drafter.named_parameters()}


def assert_same_gradients(drafter: Drafter, weights: dict[str, Tensor]) -> None:
    for name, parameter in drafter.named_parameters():
        expected = weights[name].grad
        assert parameter.grad is not None and expected is not None, name
        assert_close(parameter.grad, expected)


def assert_same_loss(name: str, loss: Loss, *, vocabulary: str = "full", **overrides: Any) -> None:
    """Total, every term and every parameter's gradient of a packed batch are the plain loops' ones."""
    drafter, rows = build(name, vocabulary=vocabulary, loss=loss, **overrides), documents(ROWS)
    assert isinstance(drafter, BlockDrafter)
    weights = exact_weights(drafter)
    expected, terms = naive.block_loss(
        weights,
        target_head(),
        rows,
        drafter.objective,
        row_tokens=ROW_TOKENS,
        block_size=4,
        anchor_first=drafter.sample_from_anchor,
        draft_ids=VOCABULARIES[vocabulary].draft_to_target.tolist(),
        normalizer=loss.normalizer,
        supervision=loss.supervision,
        markov=overrides.get("markov", "vanilla") if name == "dspark" else None,
        window=drafter.window_attention,
    )
    batch = pack(rows)
    actual = drafter.loss(drafter(batch), batch)
    assert_close(actual.total, expected)
    assert actual.terms.keys() == terms.keys()
    for term, value in terms.items():
        assert_close(actual.terms[term], value)
    actual.total.backward()
    expected.backward()
    assert_same_gradients(drafter, weights)


@BLOCK_DRAFTERS
@BOTH_VOCABULARIES
@pytest.mark.parametrize("convention", ["paper", "speculators", "deepspec"])
def test_loss_is_the_references(name: str, vocabulary: str, convention: str):
    """Sections 3.2 to 4.3: anchors, masks, weights, terms and normalisers of each convention."""
    assert_same_loss(name, loss_of(convention), vocabulary=vocabulary)


@BLOCK_DRAFTERS
def test_loss_in_the_other_layout_is_the_references(name: str):
    assert_same_loss(name, loss_of(), vocabulary="reduced", sample_from_anchor=name == "dflash")


@pytest.mark.parametrize("markov", ["gated", "rnn", None])
def test_loss_with_other_markov_heads_is_the_references(markov: str | None):
    assert_same_loss("dspark", loss_of(), vocabulary="reduced", markov=markov)


@BLOCK_DRAFTERS
@pytest.mark.parametrize("origin", ["anchor", "query"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_loss_with_a_window_is_the_references(name: str, origin: str, causal: bool):
    """One layer with a window that cuts the longest document, one without."""
    window = {"tokens": 4, "origin": origin, "causal": causal, "full_layers": (1,)}
    assert_same_loss(name, loss_of(), window=window)


def test_dpace_over_all_divergences_is_the_references():
    terms = {**dict.fromkeys(TERMS, 0.5), "confidence": 0.7}
    assert_same_loss("dspark", loss_of(weighting="dpace", decay=0.4, terms=terms), vocabulary="reduced")


@BLOCK_DRAFTERS
def test_loss_of_two_rows_is_their_mean_weighted_by_decayed_slots(name: str):
    drafter, rows = build(name), documents()
    totals, masses = [], []
    for row in rows:
        batch = pack([row])
        with torch.no_grad():
            output = drafter(batch)
            totals.append(float(drafter.loss(output, batch).total))
        slots = output.supervised.nonzero()[:, 1].tolist()
        masses.append(sum(math.exp(-slot / 4.0) for slot in slots))
    both = tiny_batch()
    with torch.no_grad():
        total = float(drafter.loss(drafter(both), both).total)
    expected = sum(total * mass for total, mass in zip(totals, masses, strict=True)) / sum(masses)
    assert total == pytest.approx(expected, rel=1e-5)


@BLOCK_DRAFTERS
def test_drafting_block_is_the_training_graphs(name: str):
    """Golden test 7: with a context cache built in several pieces, the block at every anchor of the document."""
    drafter = build(name)
    assert isinstance(drafter, BlockDrafter)
    sample = document("0" * 3 + "1" * 14, seed=5)
    batch = pack([[document("0110", seed=6), sample]])
    with torch.no_grad():
        hidden = drafter(batch).hidden
        anchors = (drafter.anchors(batch) - 4).tolist()
        context = None
        for anchor in (3, 4, 7, 8, 13):
            if context is None:
                context = context_of(sample, anchor=anchor)
            else:
                new = slice(context.position, anchor)
                context.advance(sample.token_ids[new], sample.hidden_states[new], int(sample.token_ids[anchor]))
            assert_close(drafter.draft_blocks([context])[0], hidden[anchors.index(anchor)])


@BLOCK_DRAFTERS
def test_a_block_may_start_a_document(name: str):
    """No state is known before the first token; the block is drafted from the anchor alone."""
    drafter = build(name)
    assert isinstance(drafter, BlockDrafter)
    sample = document("111111", seed=7)
    with torch.no_grad():
        assert_close(drafter.draft_blocks([context_of(sample, anchor=0)])[0], drafter(pack([[sample]])).hidden[0])


def test_num_draft_tokens_follow_the_layout():
    assert build("dflash", block_size=6).num_draft_tokens == 5
    assert build("dspark", block_size=6).num_draft_tokens == 6


@BLOCK_DRAFTERS
def test_a_block_of_one_slot_is_refused(name: str):
    with pytest.raises(ValueError, match="block_size=1 must be at least 2"):
        build(name, block_size=1)


@BLOCK_DRAFTERS
@pytest.mark.parametrize("key, value", [("num_layers", "two"), ("num_anchors", None), ("block_size", 4.5)])
def test_wrong_types_name_their_key(name: str, key: str, value: Any):
    with pytest.raises(ValueError, match=key):
        build(name, **{key: value})


@BOTH_VOCABULARIES
def test_dspark_walks_with_the_markov_bias_of_each_drafted_token(vocabulary: str):
    """q of slot k is softmax(U_k + W2 W1[x_(k-1)]) with the token that was drawn; confidence has the same tokens."""
    drafter = build("dspark", vocabulary=vocabulary)
    assert isinstance(drafter, DSpark)
    sample, sampling = document("0" * 10, seed=8), Sampling(temperature=1.0)
    proposal = propose(
        drafter,
        context_of(sample, anchor=6),
        num_draft_tokens=4,
        sampling=sampling,
        generator=torch.Generator().manual_seed(1),
    )
    weights = exact_weights(drafter)
    draft_ids = VOCABULARIES[vocabulary].draft_to_target
    hidden = naive.block_hidden(weights, target_head(), sample, 6, 4)
    previous = int(sample.token_ids[6])
    assert proposal.probabilities is not None and proposal.confidence is not None
    for k, token in enumerate(proposal.token_ids.tolist()):
        e = weights["markov_head.markov_w1.weight"][previous]
        z = target_head().lm_head[draft_ids].double() @ hidden[k] + weights["markov_head.markov_w2.weight"] @ e
        assert_close(proposal.probabilities[k, draft_ids], z.softmax(0).detach())
        logit = weights["confidence_head.proj.weight"][0] @ torch.cat([hidden[k], e])
        confidence = torch.sigmoid(logit + weights["confidence_head.proj.bias"][0])
        assert_close(proposal.confidence[k], confidence.detach())
        previous = token


def test_dspark_confidence_of_the_walk_is_that_of_training():
    """Golden test 8 for the confidence head; the contract suite has it for the distributions."""
    drafter = build("dspark")
    assert isinstance(drafter, DSpark)
    sample = document("00011111", seed=9)
    with torch.no_grad():
        output = drafter(pack([[sample]]))
        expected = drafter.confidence_logits(output.hidden, output.previous_token_ids).sigmoid()[0]
    forced = sample.token_ids[4:8]
    proposal = propose(
        drafter, context_of(sample, anchor=3), num_draft_tokens=4, sampling=Sampling(), forced_token_ids=forced
    )
    assert proposal.confidence is not None
    assert_close(proposal.confidence, expected)
    assert torch.equal(proposal.token_ids, forced)


def test_dflash_has_no_confidence_and_no_order_inside_the_block():
    drafter = build("dflash")
    sample, sampling = document("0" * 10, seed=10), Sampling(temperature=1.0)
    proposals = [
        propose(
            drafter,
            context_of(sample, anchor=5),
            num_draft_tokens=3,
            sampling=sampling,
            forced_token_ids=torch.tensor(forced),
        )
        for forced in ([2, 3, 4], [9, 8, 7])
    ]
    assert proposals[0].confidence is None
    assert proposals[0].probabilities is not None and proposals[1].probabilities is not None
    assert torch.equal(proposals[0].probabilities, proposals[1].probabilities)


def test_confidence_loss_reaches_hidden_states_and_markov_embeddings_but_not_the_logits():
    """Golden test 17: c* is a constant, the confidence's features are not detached."""
    drafter = build("dspark", loss=loss_of(terms={"ce": 0.0, "confidence": 1.0}))
    batch = tiny_batch()
    drafter.loss(drafter(batch), batch).total.backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters()}
    w2 = gradients["markov_head.markov_w2.weight"]
    assert w2 is not None and (w2 == 0).all(), "z = U + W2 W1[x] enters the confidence loss through c* alone"
    for name in ("markov_head.markov_w1.weight", "confidence_head.proj.weight", "norm.weight", "fc.weight"):
        gradient = gradients[name]
        assert gradient is not None and (gradient != 0).any(), name


def test_markov_bias_is_looked_up_with_target_ids():
    drafter = build("dspark", vocabulary="reduced")
    assert isinstance(drafter, DSpark)
    hidden = torch.zeros(1, SPEC.hidden_size)
    token = 28  # outside the draft vocabulary, yet it may come before a slot
    with torch.no_grad():
        logits = drafter.head(hidden, torch.tensor([token]))
        assert drafter.markov_head is not None
        bias = drafter.markov_head.markov_w2.weight @ drafter.markov_head.markov_w1.weight[token]
    assert logits.shape == (1, VOCABULARIES["reduced"].size)
    assert_close(logits[0], bias)


def test_labels_outside_the_draft_vocabulary_have_no_cross_entropy():
    """They keep their place in the denominator, so that a small vocabulary does not weigh its tokens more."""
    drafter = build("dflash", vocabulary="reduced")
    batch = tiny_batch()
    with torch.no_grad():
        output = drafter(batch)
        log_q = logits_of(drafter, output).log_softmax(-1)
    total = mass = 0.0
    left_out = 0
    for block, slot in output.supervised.nonzero().tolist():
        weight = math.exp(-slot / 4.0)
        mass += weight
        draft_id = int(VOCABULARIES["reduced"].target_to_draft[output.labels[block, slot]])
        left_out += draft_id < 0
        total -= weight * float(log_q[block, slot, draft_id]) if draft_id >= 0 else 0.0
    assert left_out > 0
    with torch.no_grad():
        assert float(drafter.loss(output, batch).total) == pytest.approx(total / mass, rel=1e-5)


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn", None])
def test_markov_walk_is_teacher_forcing(markov: str | None):
    """Golden test 8 for every kind: the walk over forced tokens has the training graph's distributions."""
    drafter = build("dspark", markov=markov)
    sample = document("00011111", seed=9)
    with torch.no_grad():
        expected = logits_of(drafter, drafter(pack([[sample]])))[0].softmax(-1)
    proposal = propose(
        drafter,
        context_of(sample, anchor=3),
        num_draft_tokens=4,
        sampling=Sampling(temperature=1.0),
        forced_token_ids=sample.token_ids[4:8],
    )
    assert proposal.probabilities is not None
    assert_close(proposal.probabilities, expected)


@BLOCK_DRAFTERS
def test_a_window_serves_from_the_query_whatever_it_was_trained_from(name: str):
    windows = [{"tokens": 5, "origin": origin, "causal": True, "full_layers": ()} for origin in ("anchor", "query")]
    trained_from_anchor, trained_from_query = (build(name, window=window) for window in windows)
    assert isinstance(trained_from_anchor, BlockDrafter) and isinstance(trained_from_query, BlockDrafter)
    sample = document("0" * 11 + "1" * 6, seed=5)
    batch = pack([[sample]])
    with torch.no_grad():
        served = trained_from_anchor.draft_blocks([context_of(sample, anchor=11)])[0]
        assert_close(served, trained_from_query(batch).hidden[0])
        assert not torch.allclose(served, trained_from_anchor(batch).hidden[0])


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"tokens": 3, "origin": "anchor", "causal": True, "full_layers": ()}, "window.tokens=3"),
        ({"tokens": 9, "origin": "anchor", "causal": True, "full_layers": (0, 1)}, "not all"),
        ({"tokens": 9, "origin": "anchor", "causal": True, "full_layers": (2,)}, r"window.full_layers=\[2\]"),
        ({"tokens": 9, "origin": "end", "causal": True, "full_layers": ()}, "origin"),
    ],
)
def test_a_window_that_cannot_be_is_refused(window: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        build("dspark", window=window)


def test_a_recurrent_head_wants_the_anchor_first_layout():
    with pytest.raises(ValueError, match="markov=rnn with sample_from_anchor=false"):
        build("dspark", markov="rnn", sample_from_anchor=False)


def test_initialisations_of_the_markov_head():
    """The paper's bias begins close to nothing; Speculators' does not."""

    def stds(init: str) -> tuple[float, float]:
        torch.manual_seed(0)
        borrowed = Borrowed(SPEC, target_head(), VOCABULARIES["full"])
        drafter = DRAFTERS["dspark"](borrowed=borrowed, recipe=recipe(), markov_init=init, markov_rank=256)
        assert isinstance(drafter, DSpark) and drafter.markov_head is not None
        head = drafter.markov_head
        return float(head.markov_w1.weight.detach().std()), float(head.markov_w2.weight.detach().std())

    assert stds("paper") == pytest.approx((0.02, 0.02), rel=0.1)
    assert stds("speculators") == pytest.approx((0.01, 1 / 16 / 3**0.5), rel=0.1)
