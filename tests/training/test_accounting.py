"""FLOPs against torch's own counter, and rates that add up over resumed parts."""

from dataclasses import fields
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from fitting import RESUMING, fit
from tiny_world import DRAFTERS, build, tiny_batch
from torch import nn
from torch.utils import flop_counter

from dspark_lab.training.accounting import COUNTED_BATCHES, COUNTED_EVERY, Accounting, Totals
from dspark_lab.training.flops import FlopCount, measure_peak_flops

pytestmark = RESUMING


def test_flops_of_two_layers_by_hand():
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with FlopCount() as count:
        network(torch.ones(10, 8)).sum().backward()
    forward = 2 * 10 * (8 * 16 + 16 * 4)
    backward = 2 * 10 * (8 * 16 + 2 * 16 * 4)  # the first layer's input needs no gradient
    assert count.flops == forward + backward


def test_attention_on_cpu_is_counted_forward_and_backward():
    query, key, value = (torch.ones(1, 2, length, 8, requires_grad=True) for length in (6, 10, 10))
    with FlopCount() as count:
        nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
    product = 2 * 2 * 6 * 10 * 8  # heads, queries, keys, head size
    assert count.flops == 2 * product + 5 * product  # the backward pass does the scores again


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafters_flops_hold_all_that_torchs_counter_finds(name: str, monkeypatch: pytest.MonkeyPatch):
    """Gradients of the head are computed inside forward: neither counter may miss them."""
    # What confuses torch's counter; the total does not need it.
    monkeypatch.setattr(flop_counter, "ModuleTracker", lambda: MagicMock(parents={"Global"}))
    drafter, batch = build(name), tiny_batch()
    with FlopCount() as count:
        drafter.loss(drafter(batch), batch).total.backward()
    with flop_counter.FlopCounterMode(display=False) as reference:
        drafter.loss(drafter(batch), batch).total.backward()
    assert count.flops >= reference.get_total_flops() > 0
    parameters = sum(p.numel() for name, p in drafter.named_parameters() if p.ndim > 1 and "w1" not in name)
    assert count.flops > 6 * parameters  # at least one slot through every matrix, forward and backward


def test_the_peak_is_a_speed():
    peak = measure_peak_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < peak < 1e14


def test_totals_add_and_subtract():
    one, two = Totals(1, 2, 3.0, 4.0, 5.0), Totals(10, 20, 30.0, 40.0, 50.0)
    assert one + two == Totals(11, 22, 33.0, 44.0, 55.0)
    assert (one + two) - one == two


def test_rates():
    accounting = Accounting()
    assert accounting.rates(Totals()) == {}
    totals = Totals(tokens=100, rows=6, time_s=4.0, wait_s=1.0, capacity=1000.0)
    assert accounting.rates(totals) == {"tokens_per_s": 25.0, "data_wait_share": 0.25}
    assert accounting.flops(totals) is None
    accounting.counted_flops, accounting.counted_rows = 80, 4  # 20 a row
    assert accounting.flops(totals) == pytest.approx(6 * 20)
    assert accounting.rates(totals)["mfu"] == pytest.approx(6 * 20 / 1000)


def test_a_training_is_counted_over_its_parts(tmp_path: Path):
    first, second = Accounting(), Accounting()
    fit(build("dspark"), tmp_path, [first], steps=4)
    trainer = fit(build("dspark"), tmp_path, [second], steps=COUNTED_EVERY + 2, resume=True)
    assert first.tokens == 4 * tiny_batch().num_tokens
    assert second.tokens == (COUNTED_EVERY + 2) * tiny_batch().num_tokens
    assert second.totals.rows == (COUNTED_EVERY + 2) * 2
    assert all(getattr(second.totals, f.name) > getattr(first.totals, f.name) for f in fields(Totals))
    assert first.counted_batches == 3 and second.counted_batches == COUNTED_BATCHES + 1
    rates = second.rates(second.totals)
    assert rates.keys() == {"tokens_per_s", "data_wait_share", "mfu"}
    assert 0 < rates["mfu"] < 1 and 0 < rates["data_wait_share"] < 1
    assert {"tokens", "train/tokens_per_s", "train/data_wait_share", "train/mfu"} <= trainer.logged_metrics.keys()


def test_a_failing_step_leaves_no_counter_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drafter = build("dflash")
    loss, calls = drafter.loss, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("lost")
        return loss(*args)

    monkeypatch.setattr(drafter, "loss", failing)
    with pytest.raises(RuntimeError, match="lost"):
        fit(drafter, tmp_path, [Accounting()], steps=4)
    assert torch._C._len_torch_dispatch_stack() == 0
