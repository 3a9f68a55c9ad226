"""Slot weights, normalizers and the configured conventions, by hand-checked numbers."""

import pytest
import torch
from tiny_world import CONF, build, loss_of, tiny_batch

from dspark_lab.drafter.dspark import DSpark
from dspark_lab.drafter.objective import Objective, dpace, normalisation

CONVENTIONS = [path.stem for path in sorted((CONF / "loss").glob("*.yaml"))]


def objective(**overrides) -> Objective:
    values = {"terms": {"ce": 1.0}, "weighting": "exponential", "decay": 4.0, "labels": "data", "outside": "keep"}
    return Objective(**{**values, **overrides})


def test_golden_decay():
    """Section 3.6: gamma 4 and 7, the normaliser of a full block and of the masked block 1110000."""
    expected = [1, 0.778801, 0.606531, 0.472367, 0.367879, 0.286505, 0.223130]
    decay = objective().decays(7)
    assert decay.tolist() == pytest.approx(expected, abs=1e-6)
    assert float(decay.sum()) == pytest.approx(3.735212, abs=1e-5)
    assert float((decay * torch.tensor([1, 1, 1, 0, 0, 0, 0])).sum()) == pytest.approx(2.385332, abs=1e-6)
    expected = [1, 0.866878, 0.751477, 0.651439, 0.564718, 0.489542, 0.424373, 0.367879]
    assert objective(decay=7.0).decays(8).tolist() == pytest.approx(expected, abs=1e-6)
    assert objective(weighting="geometric", decay=0.8).decays(3).tolist() == pytest.approx([1, 0.8, 0.64])


def test_golden_dpace():
    """Section 3.6, and the same with a slot that is not supervised: its factor is 1 and its weight 0."""
    probability = torch.tensor([[0.9, 0.5, 0.2, 0.8]])
    everywhere = torch.ones(1, 4, dtype=torch.bool)
    assert dpace(probability, everywhere, floor=0.5)[0].tolist() == pytest.approx([2.47475, 1.52475, 0.81225, 0.38475])
    gap = torch.tensor([[True, False, True, True]])
    # s = [.95, 1, .6, .9]: P = [.95, -, .57, .513]
    assert dpace(probability, gap, floor=0.5)[0].tolist() == pytest.approx([2.033, 0.0, 1.083, 0.513])


def test_dpace_counts_a_label_outside_the_draft_vocabulary_as_hopeless():
    weights = objective(weighting="dpace", decay=0.5).slot_weights(
        torch.ones(2), torch.ones(1, 2, dtype=torch.bool), torch.tensor([[0.0, 0.25]])
    )
    # q = [0, 1/4]: s = [.5, .625], P = [.5, .3125]
    assert weights[0].tolist() == pytest.approx([0.8125, 0.3125])


def test_normalisers():
    halving = objective(weighting="geometric", decay=0.5)
    supervised = torch.tensor([[True, True], [True, False], [False, False]])

    def of(normalizer, *, chained, dpace=False):
        decays = (objective(weighting="dpace", decay=0.5) if dpace else halving).decays(2)
        factor, denominator = normalisation(normalizer, decays, supervised, chained=chained, num_tokens=40)
        return factor.tolist(), float(denominator)

    for chained in (True, False):
        assert of("global", chained=chained) == (1.0, 2.5)
    assert of("global", chained=False, dpace=True) == (1.0, 3.0)
    factor, one = of("speculators", chained=False)
    assert factor == pytest.approx(1 / 3, rel=1e-5) and one == 1.0
    factor, one = of("speculators", chained=True)
    assert factor == pytest.approx([1 / 2, 1.0], rel=2e-5) and one == 1.0
    factor, one = of("deepspec", chained=False)
    assert factor == pytest.approx(1 / 2.5, rel=1e-5) and one == 1.0
    factor, one = of("deepspec", chained=True)
    assert factor == pytest.approx(1 / 40) and one == 1.0


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_algorithms_find_their_objective_and_their_childrens(convention: str):
    loss = loss_of(convention)

    class MyDSpark(DSpark):
        pass

    assert "confidence" in loss.objective_of(DSpark).active
    assert loss.objective_of(MyDSpark) is loss.objective_of(DSpark)
    assert "confidence" not in loss.objective_of(type("Mine", (), {})).active


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"decay": 0.0}, "decay=0.0 for weighting=exponential"),
        ({"weighting": "geometric"}, "decay=4.0 for weighting=geometric"),
        ({"weighting": "dpace"}, "decay=4.0 for weighting=dpace"),
        ({"terms": {}}, "give at least one a weight"),
        ({"terms": {"ce": 0.0}}, "give at least one a weight"),
        ({"weighting": "dpace", "decay": 0.5, "terms": {"kl": 1.0}}, "weighting=dpace weighs by"),
    ],
)
def test_an_objective_that_cannot_be_is_refused(overrides, message: str):
    with pytest.raises(ValueError, match=message):
        objective(**overrides)


def test_a_term_that_the_drafter_lacks_is_refused():
    with pytest.raises(ValueError, match=r"loss\.dflash\.terms\.confidence=1\.0: this dflash has no such term"):
        build("dflash", loss=loss_of(terms={"ce": 1.0, "confidence": 1.0}))
    with pytest.raises(ValueError, match="no such term"):
        build("dspark", confidence=False)
    with pytest.raises(ValueError, match="the head would never learn"):
        build("dspark", loss=loss_of(terms={"ce": 1.0}))
    assert build("dspark", confidence=False, loss=loss_of(terms={"kl": 1.0, "confidence": 0.0})) is not None


@pytest.mark.parametrize("convention", ["speculators", "deepspec"])
def test_peers_normalizers_want_one_rank_and_no_accumulation(convention: str):
    loss = loss_of(convention)
    loss.check_batches(world_size=1, accumulate=1)
    for world_size, accumulate in ((2, 1), (1, 4)):
        with pytest.raises(ValueError, match=r"use loss\.normalizer=global"):
            loss.check_batches(world_size=world_size, accumulate=accumulate)
        loss_of().check_batches(world_size=world_size, accumulate=accumulate)


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark"])
def test_masking_outside_takes_the_loss_of_slots_that_no_proposal_can_win(name: str):
    batch = tiny_batch()
    terms = {"kl": 1.0, "confidence": 0.0}
    extra = {"confidence": False} if name == "dspark" else {}
    keep, mask = (
        build(name, vocabulary="reduced", loss=loss_of(outside=outside, terms=terms), **extra)
        for outside in ("keep", "mask")
    )
    with torch.no_grad():
        output = keep(batch)
        kl = keep.divergences(output).values["kl"]
        inside = keep.vocabulary.t2d[keep.target_argmax(output)]
        assert 0 < int((inside & output.supervised).sum()) < int(output.supervised.sum())
        weights = keep.decays * output.supervised
        losses = [drafter.loss(output, batch) for drafter in (keep, mask)]
    assert float(losses[0].numerator) == pytest.approx(float((weights * kl).sum()), rel=1e-5)
    assert float(losses[1].numerator) == pytest.approx(float((weights * inside * kl).sum()), rel=1e-5)
    assert losses[0].denominator == losses[1].denominator
