"""Loss, terms, metrics and every gradient are those of Speculators 0.9.0, computed by its own classes (marker ``peer``).

Weights are random and the same, anchors ours, noise off, fp32, ``loss.normalizer=speculators supervision=speculators``.
"""

from typing import Any

import pytest
import torch
from tiny_world import ALL, VOCABULARIES, assert_close, build, document, loss_of, pack
from torch import Tensor
from with_peer import needs_peer, peer

from dspark_lab.drafter.base import Drafter, DraftOutput
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.divergences import TERMS
from dspark_lab.drafter.eagle3 import Eagle3

pytestmark = needs_peer

# Documents begin with prompts, as real ones do; masks have gaps, the row ends in padding.
MASKS = ("0000110111", "000011", "0000", "000001111111101", "00001")
ROW_TOKENS = 48
ALL_TERMS = dict.fromkeys(set(TERMS) - {"soft_ce", "l1"}, 0.5)  # Speculators has these two as kl and tv
BOTH_VOCABULARIES = pytest.mark.parametrize("vocabulary", VOCABULARIES)


def samples():
    return [document(mask, seed=90 + n) for n, mask in enumerate(MASKS)]


def assert_same_gradients(drafter: Drafter, model: torch.nn.Module) -> None:
    theirs = dict(model.named_parameters())
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and theirs[name].grad is not None, name
        assert_close(parameter.grad, theirs[name].grad)


@torch.no_grad()
def hits(drafter: Drafter, output: DraftOutput) -> Tensor:
    """bool [A, S]: both arg-maxima on the draft vocabulary are the same, in supervised slots."""
    drafted = drafter.head(output.hidden, output.previous_token_ids).argmax(-1)
    return (drafted == drafter.teacher_logits(output.teacher_hidden).argmax(-1)) & output.supervised


def assert_blocks_are_theirs(name: str, *, loss: dict[str, Any], **options: Any) -> None:
    drafter = build(name, loss=loss_of("speculators", **loss), num_anchors=ALL, **options)
    assert isinstance(drafter, BlockDrafter)
    model, batch = peer.peer_of(drafter), pack([samples()], row_tokens=ROW_TOKENS)
    expected, metrics = peer.run_blocks(model, drafter, batch)
    output = drafter(batch)
    actual = drafter.loss(output, batch)
    assert_close(actual.total, expected.detach())
    for term in actual.terms:
        found = metrics.get(f"{peer.TERMS.get(term, term)}_loss_sum")
        if found is not None:  # a single divergence is reported as the loss alone
            assert_close(actual.terms[term], found)
    actual.total.backward()
    expected.backward()
    assert_same_gradients(drafter, model)

    correct = hits(drafter, output)
    first = 0 if drafter.sample_from_anchor else 1
    for slot in range(correct.shape[1]):
        assert int(metrics[f"position_{slot + first}_acc_sum"]) == int(correct[:, slot].sum())
        assert int(metrics[f"position_{slot + first}_acc_total"]) == int(output.supervised[:, slot].sum())
    lengths = 1 + correct.cumprod(1).sum(1)
    assert float(metrics["eal_sum"]) == float(lengths[output.supervised.any(1)].sum())


@pytest.mark.parametrize("name", ["dflash", "dspark"])
@BOTH_VOCABULARIES
def test_blocks_with_their_defaults(name: str, vocabulary: str):
    assert_blocks_are_theirs(name, loss={}, vocabulary=vocabulary)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_blocks_with_all_divergences_in_the_other_layout(name: str):
    terms = ALL_TERMS | ({"confidence": 0.7} if name == "dspark" else {})
    loss = {"terms": terms, "weighting": "exponential", "decay": 3.0}
    assert_blocks_are_theirs(name, loss=loss, vocabulary="reduced", sample_from_anchor=name == "dflash")


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn", None])
def test_dspark_with_every_markov_head(markov: str | None):
    assert_blocks_are_theirs("dspark", loss={}, vocabulary="reduced", markov=markov)


def test_dspark_with_a_gated_head_in_the_other_layout():
    assert_blocks_are_theirs("dspark", loss={}, markov="gated", sample_from_anchor=False)


@pytest.mark.parametrize("confidence", [True, False])
def test_dspark_with_and_without_confidence(confidence: bool):
    loss = {"terms": {"ce": 0.1, "tv": 1.8, "confidence": float(confidence)}}
    assert_blocks_are_theirs("dspark", loss=loss, confidence=confidence)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("full_layers", [(), (1,)], ids=["all layers", "one layer"])
def test_blocks_with_a_sliding_window(name: str, causal: bool, full_layers: tuple[int, ...]):
    window = {"tokens": 4, "origin": "anchor", "causal": causal, "full_layers": full_layers}
    assert_blocks_are_theirs(name, loss={}, window=window)


@pytest.mark.parametrize("sample_from_anchor", [False, True], ids=["1 + N", "anchor-first"])
def test_dflash2_over_all_candidates(sample_from_anchor: bool):
    """Over fewer ones the two differ where the label is none of them: ours skips the slot, theirs puts the label in."""
    loss = loss_of("speculators")
    options = {"num_anchors": ALL, "selector_top_k": 29, "selector_weight": 0.7, "conv_kernel_size": 3}
    drafter = build("dflash2", loss=loss, sample_from_anchor=sample_from_anchor, **options)
    assert isinstance(drafter, BlockDrafter)
    model, batch = peer.peer_of(drafter), pack([samples()], row_tokens=ROW_TOKENS)
    expected, metrics = peer.run_blocks(model, drafter, batch)
    actual = drafter.loss(drafter(batch), batch)
    assert_close(actual.total, expected.detach())
    assert_close(actual.terms["selector"], metrics["selector_loss_sum"])
    actual.total.backward()
    expected.backward()
    assert_same_gradients(drafter, model)


def assert_chains_are_theirs(*, loss: dict[str, Any] | None = None, **options: Any) -> None:
    drafter = build("eagle3", loss=loss_of("speculators", **(loss or {})), **options)
    assert isinstance(drafter, Eagle3)
    model, batch = peer.peer_of(drafter), pack([samples()], row_tokens=ROW_TOKENS)
    expected, metrics = peer.run_chains(model, drafter, samples(), ROW_TOKENS)
    output = drafter(batch)
    actual = drafter.loss(output, batch)
    assert_close(actual.total, expected.detach())
    for term in actual.terms:
        steps = [metrics.get(f"{peer.TERMS[term]}_loss_{t}_sum") for t in range(drafter.ttt_steps)]
        if None not in steps:
            assert_close(actual.terms[term], torch.stack(steps).sum())
    actual.total.backward()
    expected.backward()
    assert_same_gradients(drafter, model)
    correct = hits(drafter, output)
    for step in range(drafter.ttt_steps):
        assert int(metrics[f"full_acc_{step}_total"]) == int(output.supervised[:, step].sum())
    assert int(metrics["full_acc_0_sum"]) == int(correct[:, 0].sum())


@BOTH_VOCABULARIES
@pytest.mark.parametrize("num_layers", [1, 2])
def test_chains_with_their_command_lines_defaults(vocabulary: str, num_layers: int):
    norms = {"feature_norm": "joint", "norm_before_residual": True, "norm_output": True}
    assert_chains_are_theirs(vocabulary=vocabulary, num_layers=num_layers, **norms)


@pytest.mark.parametrize(
    "options",
    [{}, {"feature_norm": "layer", "norm_output": True}, {"qk_norm": True, "norm_before_residual": True}],
    ids=["paper", "EAGLE-3.1", "qwen3"],
)
def test_chains_with_other_norms(options: dict[str, Any]):
    assert_chains_are_theirs(vocabulary="reduced", **options)


def test_chains_with_all_divergences_and_a_decay():
    terms = {"terms": ALL_TERMS, "weighting": "geometric", "decay": 0.8}
    assert_chains_are_theirs(loss=terms, vocabulary="reduced", ttt_steps=4)


@pytest.mark.parametrize("full_layers", [(), (1,)], ids=["all layers", "one layer"])
def test_chains_with_a_sliding_window(full_layers: tuple[int, ...]):
    assert_chains_are_theirs(window={"tokens": 4, "origin": "anchor", "causal": True, "full_layers": full_layers})
