"""Prompt sources: iterables of conversations, and the rule that keeps their splits apart."""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib import metadata
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dspark_lab.data.shapes import Columns, read_messages, recognise
from dspark_lab.records import Conversation, content_hash
from dspark_lab.validation import checked


@runtime_checkable
class PromptSource(Protocol):
    """Anything that yields conversations, the same ones each time.

    A source that knows them has the attributes ``revision`` and ``licence``, which the run card shows.
    """

    def __iter__(self) -> Iterator[Conversation]: ...


class JsonLines:
    """Conversations of a JSONL file (``.gz`` too): each line has ``messages``, ``prompt`` or another recognised shape.

    The shapes are those of ``shapes.recognise``; ``columns`` names others. A line may also have ``id`` and ``domain``;
    an ``id`` defaults to the hash of the messages. Raises ValueError naming file and line for broken JSON or another
    shape, and when the file holds fewer than ``num_prompts`` conversations.
    """

    @checked
    def __init__(
        self,
        *,
        path: Path,
        domain: str = "default",
        num_prompts: int | None = None,
        columns: Columns | None = None,
    ) -> None:
        if num_prompts is not None and num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts}: must be at least 1, or null for the whole file")
        self.path = path.expanduser()
        self.domain = domain
        self.num_prompts = num_prompts
        self.columns = columns
        if not self.path.is_file():
            raise ValueError(f"path={self.path}: no such file; give a JSONL file of messages or prompts")

    def __iter__(self) -> Iterator[Conversation]:
        count = 0
        for conversation in islice(self._conversations(), self.num_prompts):
            count += 1
            yield conversation
        if self.num_prompts is not None and count < self.num_prompts:
            raise ValueError(f"num_prompts={self.num_prompts}: {self.path} holds only {count}; lower num_prompts")

    def _conversations(self) -> Iterator[Conversation]:
        opener = gzip.open if self.path.suffix == ".gz" else open
        with opener(self.path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield self._parse(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"{self.path}, line {number}: {error}") from error

    def _parse(self, row: Any) -> Conversation:
        if not isinstance(row, dict):
            raise ValueError(f"expected an object, e.g. with 'messages' or 'prompt', not {row!r:.80}")
        messages = read_messages(row, self.columns or recognise(row))
        return Conversation(
            id=str(row.get("id", content_hash(messages))),
            messages=messages,
            domain=str(row.get("domain", self.domain)),
        )


class ReasoningGym:
    """Procedurally generated questions of the ``reasoning-gym`` package: one user message each.

    Ids are ``task-seed-index``. Most tasks draw item i with ``seed + i``: seeds of different splits must lie further
    apart than ``num_prompts`` (``disjoint`` drops what still repeats). Its code tasks are ``bf``, made procedurally, and
    ``codeio``, which *executes* the Python snippets that ship with the package.
    """

    licence = "Apache-2.0"

    @checked
    def __init__(self, *, num_prompts: int, seed: int, task: str = "gsm_symbolic", domain: str = "math") -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts}: must be at least 1")
        self.task = task
        self.num_prompts = num_prompts
        self.seed = seed
        self.domain = domain

    @property
    def revision(self) -> str:
        return f"reasoning-gym {metadata.version('reasoning-gym')}"

    def __iter__(self) -> Iterator[Conversation]:
        try:
            import reasoning_gym
        except ImportError as error:
            raise ImportError(
                "the prompt source ReasoningGym needs reasoning-gym: pip install reasoning-gym==0.1.25"
            ) from error
        try:
            questions = reasoning_gym.create_dataset(self.task, size=self.num_prompts, seed=self.seed)
        except ValueError as error:
            raise ValueError(f"task={self.task!r}: reasoning-gym cannot make it: {error}") from error
        for index in range(self.num_prompts):
            with redirect_stdout(StringIO()):  # some tasks print as they are made
                question = questions[index]["question"]
            yield Conversation(
                id=f"{self.task}-{self.seed}-{index}",
                messages=({"role": "user", "content": question},),
                domain=self.domain,
            )


@dataclass(frozen=True, slots=True)
class Splits:
    """Prompts without overlap; ``dropped`` counts by reason what was left out to make it so.

    ``train_positions``: the place of each training prompt among the distinct prompts of its source. It does not move
    when another split comes to hold an earlier prompt.
    """

    train: tuple[Conversation, ...]
    validation: tuple[Conversation, ...]
    evaluation: tuple[Conversation, ...]
    dropped: Mapping[str, int]
    train_positions: tuple[int, ...]


def disjoint(
    *,
    train: Iterable[Conversation],
    validation: Iterable[Conversation] = (),
    evaluation: Iterable[Conversation] = (),
) -> Splits:
    """Splits that share no prompt (by the content of its messages), and none twice within a split.

    A prompt stays where it measures most: evaluation before validation before train; the order within a split is kept.
    Raises ValueError when two different prompts of one split have the same id.
    """
    owner: dict[str, str] = {}
    kept: dict[str, dict[str, tuple[Conversation, int]]] = {}
    dropped: Counter[str] = Counter()
    for split, prompts in (("evaluation", evaluation), ("validation", validation), ("train", train)):
        kept[split] = {}
        distinct: dict[str, set[str]] = defaultdict(set)
        for prompt in prompts:
            content = content_hash(prompt.messages, 32)
            position = len(distinct[prompt.source])
            distinct[prompt.source].add(content)
            if content in owner:
                same = owner[content] == split
                dropped[f"{split}_repeated" if same else f"{split}_prompt_also_in_{owner[content]}"] += 1
                continue
            if prompt.id in kept[split]:
                raise ValueError(f"{split}: two different prompts have the id {prompt.id!r}; ids must be unique")
            owner[content] = split
            kept[split][prompt.id] = prompt, position
    found = {split: tuple(prompt for prompt, _ in pairs.values()) for split, pairs in kept.items()}
    positions = tuple(position for _, position in kept["train"].values())
    return Splits(found["train"], found["validation"], found["evaluation"], dict(dropped), positions)


def to_prompt(conversation: Conversation) -> Conversation:
    """The part that a target is asked to answer: everything before a closing assistant turn.

    Raises ValueError when nothing is left.
    """
    messages = conversation.messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError(f"conversation {conversation.id!r} has no message before the assistant's turn")
    return replace(conversation, messages=messages, answer_token_ids=None, sampling=None, finish=None)
