"""The shapes of published datasets, each as its columns and one row."""

import pytest

from dspark_lab.data.shapes import Columns, read_messages, recognise

HI, YES = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
SYSTEM = {"role": "system", "content": "be kind"}


def read(row: dict, columns: Columns | None = None) -> list[dict]:
    return [dict(message) for message in read_messages(row, columns or recognise(row.keys()))]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, YES]},
        {"messages": [HI, YES], "prompt": "hi", "id": 3},  # the whole chat, whatever else is there
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"conversations": [HI, YES]},
        {"conversation": [HI | {"redacted": None}, YES], "model": "m"},
        {"prompt": "hi", "response": "yes"},
        {"prompt": "hi", "completion": "yes"},
        {"prompt": "hi", "answer": "yes"},
        {"prompt": [HI], "completion": [YES]},
        {"instruction": "hi", "input": "", "output": "yes"},
        {"question": "hi", "answer": "yes"},
    ],
    ids=lambda row: "+".join(row),
)
def test_recognised_shapes(row):
    assert read(row) == [HI, YES]


def test_what_goes_with_the_prompt_is_kept():
    alpaca = {"instruction": "Add.", "input": "2 + 3", "output": "5"}
    assert read(alpaca)[0] == {"role": "user", "content": "Add.\n\n2 + 3"}
    assert read({"system_prompt": "be kind", "question": "hi", "response": "yes"}) == [SYSTEM, HI, YES]
    assert read({"system_prompt": "", "question": "hi", "response": "yes"}) == [HI, YES]
    assert read({"system": "be kind", "messages": [SYSTEM, HI]}) == [SYSTEM, HI]  # not twice
    assert read({"conversations": [{"from": "system", "value": "be kind"}, HI]}) == [SYSTEM, HI]


def test_a_prompt_may_have_no_answer():
    assert read({"prompt": "hi"}) == [HI]
    assert read({"prompt": "hi", "response": None}) == [HI]


def test_other_names_are_mapped():
    assert read({"text": "hi", "label": 1}, Columns(prompt="text")) == [HI]
    assert read({"q": "hi", "a": "yes", "s": "be kind"}, Columns(prompt="q", response="a", system="s")) == [
        SYSTEM,
        HI,
        YES,
    ]
    assert read({"dialog": [HI, YES], "prompt": "no"}, Columns(messages="dialog")) == [HI, YES]


def test_tool_calls_and_thoughts_stay_with_their_message_and_nulls_go():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "reasoning_content": "hmm", "name": None}
    assert read({"messages": [HI, call]})[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1"}],
        "reasoning_content": "hmm",
    }


def test_columns_that_are_not_known_are_listed_beside_the_mapping_that_would_do():
    with pytest.raises(ValueError, match=r"\['label', 'text'\] are not recognised .*columns=\{prompt: text"):
        recognise(["text", "label"])


@pytest.mark.parametrize(
    ("row", "columns", "complaint"),
    [
        ({"messages": []}, None, "'messages' must be a non-empty list"),
        ({"messages": "hi"}, None, "'messages' must be a non-empty list"),
        ({"messages": ["hi"]}, None, "message 0 must be an object"),
        ({"messages": [HI, {"role": "assistant"}]}, None, "message 1: 'content' must be a string, not None"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            None,
            "message 0: 'content' must be a string",
        ),
        ({"conversations": [{"from": "bird", "value": "hi"}]}, None, "'from' is 'bird', not one of system, human"),
        ({"prompt": 3}, None, "'prompt' must be text or a non-empty list"),
        ({"messages": [HI], "tools": [{"name": "add"}]}, None, "'tools' holds definitions that would be lost"),
        ({"prompt": "hi"}, Columns(prompt="text"), r"the row has no 'text', only \['prompt'\]"),
    ],
)
def test_a_row_that_cannot_be_read_says_why(row, columns, complaint):
    with pytest.raises(ValueError, match=complaint):
        read(row, columns)


@pytest.mark.parametrize(
    "given", [{}, {"messages": "m", "prompt": "p"}, {"response": "r"}, {"messages": "m", "input": "i"}]
)
def test_mappings_that_contradict_themselves_are_refused(given):
    with pytest.raises(ValueError, match="columns: "):
        Columns(**given)
