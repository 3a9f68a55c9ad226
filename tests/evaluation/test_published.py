"""Ours beside what was published."""

import pytest

from dspark_lab.evaluation.published import Beside, Published, compare_published
from dspark_lab.records import Trace, VerifyStep


def trace(name: str, domain: str, accepted: list[int]) -> Trace:
    steps = tuple(VerifyStep(0, 7, number) for number in accepted)
    return Trace(f"{domain}/{name}", domain, steps, 1 + len(steps) + sum(accepted))


TRACES = [trace(str(n), "gsm8k", [5, 5 + n % 3]) for n in range(30)] + [trace("a", "mt_bench", [1, 2])] * 2


def test_every_domain_is_judged_by_itself() -> None:
    published = Published(source="a paper", acceptance_length={"gsm8k": 6.55, "mt_bench": 4.0})
    math, chat = compare_published(TRACES, published, seed=0)
    assert (math.domain, math.num_prompts, math.ours) == ("gsm8k", 30, pytest.approx(6.5))
    assert math.low < 6.5 < math.high and math.agrees
    assert (chat.ours, chat.published, chat.agrees) == (pytest.approx(2.5), 4.0, False)
    assert str(chat).endswith("of 2 prompts, published 4.00: disagree")


@pytest.mark.parametrize(
    ("published", "agrees"), [(6.05, True), (5.97, True), (6.15, True), (6.3, False), (5.7, False)]
)
def test_the_published_number_has_an_interval_too(published: float, agrees: bool) -> None:
    """Ours reaches from 5.9 to 6.2, each side widened by sqrt(2): 5.86 to 6.28."""
    assert Beside("gsm8k", 6.0, 5.9, 6.2, published, 100).agrees == agrees


def test_a_difference_of_less_than_one_percent_agrees() -> None:
    assert Beside("gsm8k", 6.0, 6.0, 6.0, 6.05, 2).agrees
    assert not Beside("gsm8k", 6.0, 6.0, 6.0, 6.07, 2).agrees


def test_a_domain_that_was_not_decoded_is_named() -> None:
    with pytest.raises(ValueError, match=r"published\.acceptance_length\.humaneval: .*only gsm8k, mt_bench"):
        compare_published(TRACES, Published(source="a paper", acceptance_length={"humaneval": 5.5}), seed=0)
