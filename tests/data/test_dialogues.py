"""The dialogue generator: deterministic, well-formed, varied, and right in its arithmetic."""

import re
from collections import Counter

import pytest
from pydantic import ValidationError

from dspark_lab.data.dialogues import OPEN_TASKS, TASKS, Dialogues, dialogue
from dspark_lab.records import Conversation

SAMPLE = [dialogue(seed=7, index=index) for index in range(1500)]


def texts(conversation: Conversation) -> tuple[str, ...]:
    return tuple(message["content"] for message in conversation.messages)


def test_the_same_seed_and_index_give_the_same_dialogue_whatever_was_drawn_before() -> None:
    assert dialogue(seed=7, index=1234) == SAMPLE[1234]
    assert list(Dialogues(num_prompts=50, seed=3)) == list(Dialogues(num_prompts=80, seed=3))[:50]


def test_a_known_dialogue_stays_as_it_was() -> None:
    # The committed weights learnt this generator; a change of its draws or texts needs them trained again.
    question, answer = dialogue(seed=1, index=3).messages
    assert question["content"].startswith("Hugo has 26 letters. First he sells 11. Then he finds 4 more.")
    assert answer["content"].endswith("Later he loses 4: 19 - 4 = 15. So Hugo has 15 letters.")


def test_prompts_of_different_seeds_are_disjoint_but_for_one_in_a_hundred() -> None:
    one = {texts(prompt) for prompt in Dialogues(num_prompts=2000, seed=1)}
    other = {texts(prompt) for prompt in Dialogues(num_prompts=2000, seed=2)}
    assert len(one) > 1980
    assert len(one & other) < 20


def test_prompts_are_dialogues_without_their_last_answer() -> None:
    prompts = list(Dialogues(num_prompts=100, seed=7))
    assert [prompt.id for prompt in prompts] == [f"dialogues-7-{index}" for index in range(100)]
    assert len(Dialogues(num_prompts=100, seed=7)) == 100
    for prompt, full in zip(prompts, SAMPLE, strict=False):
        assert prompt.messages == full.messages[:-1]
        assert prompt.messages[-1]["role"] == "user"
        assert prompt.answer_token_ids is None


def test_roles_alternate_after_an_optional_system_turn() -> None:
    for conversation in SAMPLE:
        roles = [message["role"] for message in conversation.messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert all(text.strip() == text != "" for text in texts(conversation))


def test_every_task_thinking_system_and_several_turns_occur() -> None:
    counts = Counter(conversation.domain for conversation in SAMPLE)
    assert set(counts) == set(TASKS) > OPEN_TASKS
    assert min(counts.values()) > 40
    messages = [message for conversation in SAMPLE for message in conversation.messages]
    assert sum("reasoning_content" in message for message in messages) > 40
    assert sum(message["role"] == "system" for message in messages) > 100
    assert sum(len(texts(conversation)) > 3 for conversation in SAMPLE) > 300


def test_every_equation_in_an_answer_holds_and_numbers_stay_below_a_hundred() -> None:
    checked = 0
    for message in (message for conversation in SAMPLE for message in conversation.messages):
        text = message["content"] + message.get("reasoning_content", "")
        assert all(int(number) < 100 for number in re.findall(r"\d+", text))
        for left, sign, right, result in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", text):
            values = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            assert values[sign] == int(result), text
            checked += 1
    assert checked > 1000


def test_domain_labels_all_prompts() -> None:
    assert {prompt.domain for prompt in Dialogues(num_prompts=20, domain="smoke")} == {"smoke"}


def test_a_source_without_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_prompts=0.*give 1 or more"):
        Dialogues(num_prompts=0)


def test_a_wrong_type_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="num_prompts"):
        Dialogues(num_prompts="many")  # type: ignore[arg-type]
