import math

import numpy as np
import pytest
import torch

from dspark_lab.evaluation.acceptance import (
    AcceptanceLength,
    AcceptanceLengthEstimate,
    acceptance_length,
    acceptance_length_estimate,
    acceptance_metrics,
    acceptance_rates,
    conditional_acceptance_rates,
    count_acceptance,
)
from dspark_lab.evaluation.bootstrap import bootstrap_ratios
from dspark_lab.records import Trace, VerifyStep


def trace(*steps: tuple[int, int], prompt_id: str = "p") -> Trace:
    """A trace from (drafted, accepted) pairs."""
    made = tuple(VerifyStep(position=index, num_draft_tokens=d, num_accepted=a) for index, (d, a) in enumerate(steps))
    return Trace(prompt_id, "math", made, num_new_tokens=1 + sum(a + 1 for _, a in steps))


# Five steps of width 3: accepted 0, 1, 3 | 2, 0.
FULL_WIDTH = [trace((3, 0), (3, 1), (3, 3)), trace((3, 2), (3, 0))]


def by_name(traces, **options):
    metrics = acceptance_metrics(traces, setting={"temperature": 0.0}, origin="measured", **options)
    return {entry.name: entry for entry in metrics}


def test_golden_numbers():
    assert acceptance_length(FULL_WIDTH) == pytest.approx(1 + 6 / 5)
    np.testing.assert_allclose(acceptance_rates(FULL_WIDTH), [3 / 5, 2 / 5, 1 / 5])
    np.testing.assert_allclose(conditional_acceptance_rates(FULL_WIDTH), [3 / 5, 2 / 3, 1 / 2])


def test_counts_per_prompt():
    counts = count_acceptance(FULL_WIDTH)
    assert counts.reached.tolist() == [[2, 1, 1], [1, 1, 0]]
    assert counts.offered.tolist() == [[3, 2, 1], [2, 1, 1]]
    assert (counts.accepted.tolist(), counts.drafted.tolist(), counts.steps.tolist()) == ([4, 2], [9, 6], [3, 2])


def test_rates_sum_to_acceptance_length_and_tokens_add_up():
    generator = np.random.default_rng(1)
    traces = [
        trace(*((7, int(a)) for a in generator.integers(0, 8, size=generator.integers(0, 12)))) for _ in range(30)
    ]
    assert acceptance_rates(traces).sum() + 1 == pytest.approx(acceptance_length(traces))
    emitted = sum(t.num_new_tokens - 1 for t in traces)
    assert emitted / sum(len(t.steps) for t in traces) == pytest.approx(acceptance_length(traces))


def test_narrow_steps_count_in_the_unconditional_denominator_only():
    traces = [trace((1, 1), (3, 2))]
    np.testing.assert_allclose(acceptance_rates(traces), [1, 1 / 2, 0])
    np.testing.assert_allclose(conditional_acceptance_rates(traces), [1, 1, 0])


def test_metrics_carry_values_counts_setting_and_origin():
    found = by_name(FULL_WIDTH)
    assert found["acceptance_length"].value == pytest.approx(2.2)
    assert found["acceptance_rate_3"].value == pytest.approx(0.2)
    assert found["conditional_acceptance_rate_2"].value == pytest.approx(2 / 3)
    counts = ("num_prompts", "num_verify_steps", "num_new_tokens", "num_drafted_tokens")
    assert [found[name].value for name in counts] == [2, 5, 13, 15]
    assert all(entry.setting == {"temperature": 0.0} and entry.origin == "measured" for entry in found.values())
    assert {entry.num_samples for entry in found.values()} == {2}
    length = found["acceptance_length"]
    assert 1 < length.low < length.value < length.high < 4


def test_what_is_not_defined_is_none():
    never = by_name([trace((2, 0)), trace((2, 0))])
    assert never["acceptance_length"].value == 1.0
    assert never["conditional_acceptance_rate_2"].value is None
    assert by_name([trace((2, 1))])["acceptance_length"].low is None  # one prompt has no spread
    nothing = by_name([trace(), trace()])  # EOS came first
    assert nothing["acceptance_length"].value is None
    assert nothing["num_verify_steps"].value == 0


def test_no_traces_is_an_error():
    with pytest.raises(ValueError, match="no traces"):
        acceptance_metrics([], setting={}, origin="measured")


def test_bootstrap_golden_extremes():
    # Two prompts: the resamples are (0, 0), (0, 1), (1, 1) with weights 1/4, 1/2, 1/4: ratios 0/1, 2/4, 2/3.
    found = bootstrap_ratios([[0.0], [2.0]], [[1.0], [3.0]], seed=0)
    assert (found.value[0], found.low[0], found.high[0]) == pytest.approx((0.5, 0.0, 2 / 3))


def test_bootstrap_depends_on_the_seed_alone():
    generator = np.random.default_rng(0)
    top, bottom = generator.random((20, 3)), 1 + generator.random((20, 3))
    first, again, other = (bootstrap_ratios(top, bottom, seed=seed) for seed in (3, 3, 4))
    assert first.low.tolist() == again.low.tolist()
    assert first.low.tolist() != other.low.tolist()


def test_bootstrap_interval_covers_the_truth_as_often_as_it_says():
    """200 experiments of 40 prompts whose acceptance differs by prompt; the true ratio is 3 / 10."""
    generator = np.random.default_rng(5)
    covered = 0
    for _ in range(200):
        steps = generator.integers(5, 16, size=(40, 1))
        accepted = generator.binomial(steps, generator.beta(3, 7, size=(40, 1)))
        found = bootstrap_ratios(accepted, steps, num_resamples=400)
        covered += bool(found.low[0] <= 0.3 <= found.high[0])
    assert 0.89 <= covered / 200 <= 0.985


def test_bootstrap_resamples_prompts_not_steps():
    """Prompts that are each all or nothing: resampling steps would give an interval several times too narrow."""
    extremes = [trace(*[(1, index % 2)] * 50) for index in range(10)]
    length = by_name(extremes)["acceptance_length"]
    assert length.high - length.low > 0.5


def test_bootstrap_refuses_unlike_shapes():
    with pytest.raises(ValueError, match=r"\(2, 1\).*\(3, 1\)"):
        bootstrap_ratios([[1], [2]], [[1], [2], [3]])


AGREEMENT = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)


def test_estimate_is_the_mean_of_prefix_products():
    # Blocks give 1 + 2, 1 + 1, 1 + 3 (cut by the mask); the last has no valid slot and is left out.
    assert acceptance_length_estimate(AGREEMENT, MASK).item() == pytest.approx((3 + 2 + 4) / 3)
    assert math.isnan(acceptance_length_estimate(AGREEMENT, torch.zeros_like(MASK)).item())


def test_estimate_metric_pools_blocks_over_batches():
    metric = AcceptanceLengthEstimate()
    metric.update(AGREEMENT[:1], MASK[:1])
    metric.update(AGREEMENT[1:], MASK[1:])
    assert metric.compute().item() == pytest.approx(3.0)


def test_length_metric_pools_steps_over_batches_and_resets():
    metric = AcceptanceLength()
    metric.update(FULL_WIDTH[:1])
    metric.update(FULL_WIDTH[1:])
    assert metric.compute().item() == pytest.approx(acceptance_length(FULL_WIDTH))
    metric.reset()
    metric.update([trace((3, 3))])
    assert metric.compute().item() == pytest.approx(4.0)
