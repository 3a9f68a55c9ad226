import random

import pytest

from dspark_lab.data.overlap import answer_words, overlapping, prompt_words, words
from dspark_lab.records import Conversation


def naive(texts, references, num_words: int) -> list[bool]:
    """Every place of every text against every place of every reference."""
    return [
        any(
            text[i : i + num_words] == reference[j : j + num_words]
            for reference in references
            for i in range(len(text) - num_words + 1)
            for j in range(len(reference) - num_words + 1)
        )
        for text in texts
    ]


@pytest.mark.parametrize("num_words", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_overlap_is_what_a_double_loop_finds(num_words, seed):
    generator = random.Random(seed)

    def texts(num: int) -> list[list[str]]:
        return [generator.choices("abcd", k=generator.randrange(0, 9)) for _ in range(num)]

    some, references = texts(40), texts(4)
    found = overlapping(some, references, num_words=num_words)
    assert found == naive(some, references, num_words)
    if num_words in (2, 3):
        assert {True, False} == set(found)


def test_thirteen_words_in_a_row_are_an_overlap_and_twelve_are_none():
    question = [f"w{n}" for n in range(20)]
    assert overlapping([["x", *question[3:16], "y"], [*question[3:15], "y"], question[:12]], [question]) == [
        True,
        False,
        False,
    ]


def test_words_do_not_see_case_spaces_or_punctuation():
    assert words("Tom's  2,5 Äpfel:\n`x_1`!") == ["tom", "s", "2", "5", "äpfel", "x", "1"]


def test_system_messages_are_no_overlap_and_answers_are_read_apart():
    conversation = Conversation(
        "c",
        (
            {"role": "system", "content": "Be kind"},
            {"role": "user", "content": "Hi you"},
            {"role": "assistant", "content": "Yes"},
            {"role": "tool", "content": "5"},
            {"role": "user", "content": "No"},
        ),
    )
    assert prompt_words(conversation) == ["hi", "you", "5", "no"]
    assert answer_words(conversation) == ["yes"]
