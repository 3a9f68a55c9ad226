"""The best fixed length per load, and the form in which an engine takes it."""

from dataclasses import dataclass

import numpy as np
import pytest

from dspark_lab.hardware.protocol import StepShape
from dspark_lab.scheduler.by_load import best_lengths, ranges_of

RATES = np.array([0.8, 0.6, 0.4, 0.2])


@dataclass
class Linear:
    """A step costs ``start_s``, and ``token_s`` for each token verified; a draft costs ``draft_s``."""

    start_s: float
    token_s: float
    draft_s: float = 0.0

    def verify_time_s(self, shape: StepShape):
        return self.start_s + self.token_s * np.asarray(shape.num_verify_tokens, float)

    def draft_time_s(self, *, num_requests: int, num_context_tokens: int = 0) -> float:
        return self.draft_s


def lengths(hardware: Linear, max_requests: int = 40) -> list[int]:
    return best_lengths(RATES, hardware, max_requests=max_requests, context_tokens=100)


def test_where_tokens_cost_nothing_all_are_verified_and_where_only_they_cost_none() -> None:
    assert set(lengths(Linear(1.0, 0.0))) == {4}
    assert set(lengths(Linear(0.0, 1.0))) == {0}


def test_the_more_requests_the_shorter_and_each_length_is_the_best_by_hand() -> None:
    hardware = Linear(1.0, 0.05, draft_s=0.1)
    found = lengths(hardware)
    assert found == sorted(found, reverse=True) and len(set(found)) > 2
    for requests, best in enumerate(found, start=1):
        rates = [(1 + sum(RATES[:n])) / (1.0 + 0.05 * requests * (1 + n) + (0.1 if n else 0.0)) for n in range(5)]
        assert rates[best] == pytest.approx(max(rates))


def test_a_draft_that_costs_more_than_it_saves_is_not_made() -> None:
    assert lengths(Linear(1.0, 0.0, draft_s=10.0), 1) == [0]


def test_ranges_are_inclusive_and_leave_nothing_out() -> None:
    assert ranges_of([4, 4, 2, 0, 0]) == [(1, 2, 4), (3, 3, 2), (4, 5, 0)]


@pytest.mark.slow
@pytest.mark.vllm
def test_the_engine_reads_the_ranges_as_they_are_meant() -> None:
    dynamic = pytest.importorskip("vllm.v1.spec_decode.dynamic.utils")
    wanted = lengths(Linear(1.0, 0.05))
    read = dynamic.build_dynamic_sd_schedule_lookup(
        ranges_of(wanted), vllm_max_batch_size=len(wanted), vllm_num_speculative_tokens=4
    )
    assert read[1:] == wanted
