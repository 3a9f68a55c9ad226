"""The shipped SmolLM2 answers hold those that the demo's prompts ask for."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import dspark_lab
from dspark_lab.data.answers import AnswerBook, Assignment, SamplingMix
from dspark_lab.data.prompts import ReasoningGym, disjoint
from dspark_lab.records import Sampling

PACKAGED = Path(dspark_lab.__file__).parent / "assets" / "smollm2_135m_gsm_symbolic.jsonl.gz"
CONF = Path(__file__).parent.parent.parent / "conf"
EOS = 2


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    with gzip.open(PACKAGED, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def prompts_of(config: dict[str, Any]) -> ReasoningGym:
    return ReasoningGym(**{name: value for name, value in config.items() if name != "_target_"})


def test_every_prompt_of_the_demo_has_its_answer(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    data = yaml.safe_load((CONF / "data" / "gsm_symbolic.yaml").read_text())
    benchmark = yaml.safe_load((CONF / "benchmark" / "gsm_symbolic.yaml").read_text())
    splits = disjoint(
        train=prompts_of(data["train"]),
        validation=prompts_of(data["validation"]),
        evaluation=prompts_of(benchmark["prompts"]),
    )
    header = rows[0]
    book = AnswerBook(tmp_path, fingerprint=header["fingerprint"], template_hash=header["template_hash"])
    seeding = book.seed_from(PACKAGED)
    assert (seeding.num_copied, seeding.refused) == (len(rows) - 1, None)

    limit = data["max_new_tokens"]
    mix = SamplingMix(samplings=tuple(Sampling(**sampling, max_new_tokens=limit) for sampling in data["samplings"]))
    held_out = [
        Assignment(prompt, Sampling(max_new_tokens=limit)) for prompt in (*splits.validation, *splits.evaluation)
    ]
    wanted = mix.assign(splits.train, positions=splits.train_positions) + held_out
    assert [entry.prompt.id for entry in wanted if book.get(entry.prompt, entry.sampling) is None] == []


def test_the_target_of_the_config_wrote_them(rows: list[dict[str, Any]]) -> None:
    header = rows[0]
    target = yaml.safe_load((CONF / "target" / "smollm2_135m.yaml").read_text())
    assert target["model"] == header["target"]
    assert target["package"] in header["weights"]
    assert target["package_sha256"] in header["weights"]
    assert target["package_sha256"][:16] in header["fingerprint"]


def test_answers_are_whole_and_the_file_is_small(rows: list[dict[str, Any]]) -> None:
    assert PACKAGED.stat().st_size < 1_000_000
    for row in rows[1:]:
        ids, limit = row["answer_token_ids"], row["sampling"]["max_new_tokens"]
        assert EOS not in ids[:-1]
        assert (ids[-1] == EOS) == (row["finish"] == "stop"), row["id"]
        assert row["finish"] == "stop" or len(ids) == limit, row["id"]
    finished = sum(row["finish"] == "stop" for row in rows[1:])
    assert finished > 0.5 * len(rows)
