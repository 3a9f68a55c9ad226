"""Decoding in batches: every way writes the target's own text, and what is told of it is what it did."""

from dataclasses import replace
from itertools import count

import pytest
import torch
from toy_language import EOS, ToyBatchVerifier, random_table, toy_drafters

from dspark_lab.evaluation.batch import PLAIN, Way, evaluate_batches
from dspark_lab.records import Sampling, TokenizedConversation
from dspark_lab.scheduler.fixed import Fixed

TABLE = random_table(8, seed=3)
PROMPTS = [
    TokenizedConversation(str(number), torch.tensor(ids), torch.zeros(len(ids), dtype=torch.bool), "toy")
    for number, ids in enumerate(((1, 2), (3, 1, 4), (2, 2, 2, 2), (4, 1), (1, 1, 3)))
]
WAYS = [
    PLAIN,
    Way("two", toy_drafters(TABLE)["noisy"], lambda: Fixed(num_verified_tokens=2)),
    Way("all", toy_drafters(TABLE)["perfect"], lambda: Fixed(num_verified_tokens=4)),
]


def measured(prompts=PROMPTS, **options):
    ticks = count()
    options = {"batch_size": 2, "sampling": Sampling(max_new_tokens=24), "num_rounds": 3, **options}
    return evaluate_batches(
        lambda: ToyBatchVerifier(TABLE),
        WAYS,
        prompts,
        eos_token_ids=(EOS,),
        num_draft_tokens=4,
        seed=0,
        clock=lambda: float(next(ticks)),
        **options,
    )


@pytest.mark.parametrize("batch_size", [1, 2, 5, 16])
def test_every_way_writes_the_same_greedy_texts_in_the_order_of_the_prompts(batch_size: int) -> None:
    plain, *others = measured(batch_size=batch_size).values()
    assert len(plain.token_ids) == len(PROMPTS)
    assert all(other.token_ids == plain.token_ids for other in others)
    assert plain.token_ids == measured(batch_size=1)["plain"].token_ids


def test_what_is_told_is_what_was_done() -> None:
    found = measured()
    assert found["plain"].acceptance_length == 1 and found["plain"].num_verified == 0
    assert found["two"].num_verified == 2 and 1 < found["two"].acceptance_length < 3
    assert found["all"].num_verified == 4 and found["all"].acceptance_length > 3.5  # cut where answers end
    number = sum(len(text) for text in found["plain"].token_ids)
    for result in found.values():
        assert result.seconds == [1, 1, 1]  # one tick of the clock a turn
        assert result.rates.tolist() == [number] * 3


def test_draws_depend_on_the_seed_and_the_batch_alone() -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=24)
    first, second = (measured(sampling=sampling)["all"].token_ids for _ in range(2))
    assert first == second
    renamed = [replace(prompt, id=f"other {prompt.id}") for prompt in PROMPTS]
    assert measured(renamed, sampling=sampling)["all"].token_ids != first


def test_nothing_to_decode_is_said() -> None:
    with pytest.raises(ValueError, match="there is none to decode"):
        measured([])
