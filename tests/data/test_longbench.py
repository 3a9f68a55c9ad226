"""LongBench-v2 from a local folder: what is asked, and how lengths are told apart."""

import json

import pytest

from dspark_lab.data.benchmarks import LongBenchV2

pytest.importorskip("datasets")


@pytest.fixture
def folder(tmp_path):
    rows = [
        {"_id": f"q{n}", "length": length, "context": "word " * words, "question": "Why?",
         **{f"choice_{letter}": letter.lower() for letter in "ABCD"}, "answer": "A"}
        for n, (length, words) in enumerate([("short", 5), ("long", 50), ("medium", 10)])
    ]  # fmt: skip
    (tmp_path / "data.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path)


def test_text_question_and_choices_are_asked_and_the_answer_is_not_told(folder) -> None:
    first, second, third = LongBenchV2(path=folder, num_prompts=3, max_words=None)
    assert first.messages[0]["content"].startswith("word word")
    assert "Why?\n\n(A) a\n(B) b\n(C) c\n(D) d" in first.messages[0]["content"]
    assert [each.domain for each in (first, second, third)] == ["short", "long", "medium"] and second.id == "q1"


def test_texts_beyond_the_targets_context_are_left_out(folder) -> None:
    assert [each.id for each in LongBenchV2(path=folder, num_prompts=2, max_words=10)] == ["q0", "q2"]
    with pytest.raises(ValueError, match="num_prompts=3: only 2 texts have at most max_words=10"):
        list(LongBenchV2(path=folder, num_prompts=3, max_words=10))
