import builtins
import gzip
import json

import pytest

from dspark_lab.data.prompts import JsonLines, ReasoningGym, disjoint, to_prompt
from dspark_lab.records import Conversation


def prompt(identifier: str, content: str) -> Conversation:
    return Conversation(id=identifier, messages=({"role": "user", "content": content},))


def write(path, *rows) -> None:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))


def test_json_lines_reads_messages_and_prompts(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    write(tmp_path / "a.jsonl", {"id": 7, "messages": messages, "domain": "chat"}, "\n", {"prompt": "Grüße"})
    first, second = JsonLines(path=tmp_path / "a.jsonl", domain="math")
    assert (first.id, first.messages, first.domain) == ("7", tuple(messages), "chat")
    assert (second.messages, second.domain) == (({"role": "user", "content": "Grüße"},), "math")


def test_json_lines_ids_default_to_the_content(tmp_path):
    write(tmp_path / "a.jsonl", {"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "ho"})
    first, same, other = (conversation.id for conversation in JsonLines(path=tmp_path / "a.jsonl"))
    assert first == same != other


def test_json_lines_reads_gz_takes_the_first_and_can_be_read_twice(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n'))
    source = JsonLines(path=path, num_prompts=2)
    assert [conversation.messages[0]["content"] for conversation in source] == ["a", "b"]
    assert len(list(source)) == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "hi"', "Expecting ',' delimiter"),
        ("[]", "expected an object"),
        ('{"text": "a"}', "the columns ['text'] are not recognised"),
        ('{"messages": []}', "'messages' must be a non-empty list"),
        ('{"messages": [{"content": "hi"}]}', "message 0: 'role' must be a string"),
    ],
)
def test_json_lines_names_file_and_line_of_what_it_cannot_read(tmp_path, line, complaint):
    write(tmp_path / "bad.jsonl", {"prompt": "fine"}, line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: ") as error:
        list(JsonLines(path=tmp_path / "bad.jsonl"))
    assert complaint in str(error.value)


def test_json_lines_reads_columns_that_are_named(tmp_path):
    write(tmp_path / "a.jsonl", {"text": "hi", "reply": "yes"})
    (read,) = JsonLines(path=tmp_path / "a.jsonl", columns={"prompt": "text", "response": "reply"})
    assert [message["content"] for message in read.messages] == ["hi", "yes"]


def test_json_lines_refuses_what_is_not_there(tmp_path):
    write(tmp_path / "a.jsonl", {"prompt": "a"})
    with pytest.raises(ValueError, match=r"num_prompts=2: .*a\.jsonl holds only 1"):
        list(JsonLines(path=tmp_path / "a.jsonl", num_prompts=2))
    with pytest.raises(ValueError, match="num_prompts=0"):
        JsonLines(path=tmp_path / "a.jsonl", num_prompts=0)
    with pytest.raises(ValueError, match="no such file"):
        JsonLines(path=tmp_path / "b.jsonl")


def test_reasoning_gym_asks_the_same_questions_for_the_same_seed():
    pytest.importorskip("reasoning_gym")
    source = ReasoningGym(num_prompts=5, seed=11)
    conversations = list(source)
    assert [conversation.id for conversation in conversations] == [f"gsm_symbolic-11-{index}" for index in range(5)]
    assert conversations == list(source)
    assert conversations[:3] == list(ReasoningGym(num_prompts=3, seed=11))
    assert all(len(c.messages) == 1 and c.messages[0]["role"] == "user" and c.domain == "math" for c in conversations)
    assert {c.messages[0]["content"] for c in conversations}.isdisjoint(
        c.messages[0]["content"] for c in ReasoningGym(num_prompts=5, seed=1_000_011)
    )


def test_reasoning_gyms_code_task_is_quiet_and_the_source_knows_where_it_is_from(capsys):
    pytest.importorskip("reasoning_gym")
    source = ReasoningGym(num_prompts=3, seed=11, task="bf", domain="code")
    assert all("+" in c.messages[0]["content"] and c.domain == "code" for c in source)
    assert capsys.readouterr().out == ""
    assert source.revision.startswith("reasoning-gym 0.1.") and source.licence == "Apache-2.0"


def test_reasoning_gym_refuses_unknown_tasks_and_says_how_to_install_it(monkeypatch):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="task='no_such_task'"):
        list(ReasoningGym(num_prompts=1, seed=0, task="no_such_task"))
    with pytest.raises(ValueError, match="num_prompts=0"):
        ReasoningGym(num_prompts=0, seed=0)
    real_import = builtins.__import__

    def without_reasoning_gym(name, *arguments, **options):
        if name == "reasoning_gym":
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_reasoning_gym)
    with pytest.raises(ImportError, match=r"pip install reasoning-gym==0\.1\.25"):
        list(ReasoningGym(num_prompts=1, seed=0))


def test_splits_share_no_prompt_and_every_dropped_one_is_counted():
    splits = disjoint(
        train=[prompt("t0", "a"), prompt("t1", "b"), prompt("t2", "c"), prompt("t3", "d"), prompt("t4", "d")],
        validation=[prompt("v0", "b"), prompt("v1", "e"), prompt("v2", "f")],
        evaluation=[prompt("e0", "a"), prompt("e1", "e"), prompt("e2", "e")],
    )
    assert [c.id for c in splits.evaluation] == ["e0", "e1"]
    assert [c.id for c in splits.validation] == ["v0", "v2"]
    assert [c.id for c in splits.train] == ["t2", "t3"]
    assert splits.dropped == {
        "evaluation_repeated": 1,
        "validation_prompt_also_in_evaluation": 1,
        "train_prompt_also_in_evaluation": 1,
        "train_prompt_also_in_validation": 1,
        "train_repeated": 1,
    }


def test_positions_count_the_distinct_prompts_of_each_source_whatever_other_splits_hold():
    def train():
        contents = (("x", "a"), ("y", "b"), ("x", "a"), ("x", "c"), ("y", "d"), ("x", "e"))
        return [Conversation(f"t{n}", prompt("", c).messages, source=s) for n, (s, c) in enumerate(contents)]

    alone = disjoint(train=train())
    assert [(c.id, position) for c, position in zip(alone.train, alone.train_positions, strict=True)] == [
        ("t0", 0),
        ("t1", 0),
        ("t3", 1),
        ("t4", 1),
        ("t5", 2),
    ]
    beside = disjoint(train=train(), evaluation=[prompt("e", "c")])
    assert [c.id for c in beside.train] == ["t0", "t1", "t4", "t5"] and beside.train_positions == (0, 0, 1, 2)


def test_two_prompts_of_one_id_are_refused():
    with pytest.raises(ValueError, match="train: two different prompts have the id 'x'"):
        disjoint(train=[prompt("x", "a"), prompt("x", "b")])


def test_a_prompt_is_what_stands_before_the_closing_assistant_turn():
    question, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    assert to_prompt(Conversation("c", (question, answer, question, answer))).messages == (question, answer, question)
    assert to_prompt(Conversation("c", (question,))).messages == (question,)
    with pytest.raises(ValueError, match="conversation 'c' has no message before"):
        to_prompt(Conversation("c", (answer,)))
