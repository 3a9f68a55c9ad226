"""What of an answer is supervised when its reasoning is not to be learned."""

import torch

from dspark_lab.data.reasoning import supervise_answers_alone
from dspark_lab.records import TokenizedConversation

THOUGHT = (7, 8)  # the ids that end reasoning


def supervised(token_ids: str, mask: str) -> str:
    sample = TokenizedConversation(
        "a", torch.tensor([int(digit) for digit in token_ids]), torch.tensor([digit == "1" for digit in mask])
    )
    (found,) = supervise_answers_alone([sample], THOUGHT)
    assert torch.equal(found.token_ids, sample.token_ids) and found.id == "a"
    return "".join("1" if flag else "0" for flag in found.loss_mask.tolist())


def test_each_turn_is_supervised_behind_its_own_reasoning() -> None:
    #                 ids             mask
    assert supervised("12378455378991", "00111110011111") == "00000110000111"


def test_a_turn_without_reasoning_stays_as_it_is() -> None:
    assert supervised("123456", "001111") == "001111"
    assert supervised("177885", "001111") == "000011"
    assert supervised("178456", "000111") == "000111", "what ends before the turn is the prompt's"


def test_reasoning_that_never_ends_is_supervised_and_one_that_ends_the_turn_leaves_nothing() -> None:
    assert supervised("1237", "0011") == "0011"
    assert supervised("123478", "001111") == "000000"
