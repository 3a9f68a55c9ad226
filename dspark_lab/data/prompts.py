"""Prompt sources: iterables of conversations, and the rule that keeps their splits apart."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dspark_lab.records import Conversation, content_hash
from dspark_lab.validation import checked


@runtime_checkable
class PromptSource(Protocol):
    """Anything that yields conversations, the same ones each time."""

    def __iter__(self) -> Iterator[Conversation]: ...


class JsonLines:
    """Conversations of a JSONL file (``.gz`` too): each line has ``messages`` or ``prompt``.

    It may also have ``id`` and ``domain``. ``messages`` are chat messages with ``role`` and ``content``; ``prompt`` is
    short for one user message. An ``id`` defaults to the hash of the messages. Raises ValueError naming file and line
    for broken JSON or another shape, and when the file holds fewer than ``num_prompts`` conversations.
    """

    @checked
    def __init__(self, *, path: Path, domain: str = "default", num_prompts: int | None = None) -> None:
        if num_prompts is not None and num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts}: must be at least 1, or null for the whole file")
        self.path = path.expanduser()
        self.domain = domain
        self.num_prompts = num_prompts
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
        if not isinstance(row, dict) or ("messages" in row) == ("prompt" in row):
            raise ValueError("expected an object with either 'messages' or 'prompt'")
        messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"'messages' must be a non-empty list, not {messages!r:.80}")
        for index, message in enumerate(messages):
            _check_message(message, index)
        return Conversation(
            id=str(row.get("id", content_hash(messages))),
            messages=tuple(messages),
            domain=str(row.get("domain", self.domain)),
        )


class ReasoningGym:
    """Procedurally generated questions of the ``reasoning-gym`` package: one user message each.

    Ids are ``task-seed-index``. Most tasks draw item i with ``seed + i``: seeds of different splits must lie further
    apart than ``num_prompts`` (``disjoint`` drops what still repeats).
    """

    @checked
    def __init__(self, *, num_prompts: int, seed: int, task: str = "gsm_symbolic", domain: str = "math") -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts}: must be at least 1")
        self.task = task
        self.num_prompts = num_prompts
        self.seed = seed
        self.domain = domain

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
            yield Conversation(
                id=f"{self.task}-{self.seed}-{index}",
                messages=({"role": "user", "content": questions[index]["question"]},),
                domain=self.domain,
            )


@dataclass(frozen=True, slots=True)
class Splits:
    """Prompts without overlap; ``dropped`` counts by reason what was left out to make it so."""

    train: tuple[Conversation, ...]
    validation: tuple[Conversation, ...]
    evaluation: tuple[Conversation, ...]
    dropped: Mapping[str, int]


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
    kept: dict[str, tuple[Conversation, ...]] = {}
    dropped: dict[str, int] = {}
    for split, prompts in (("evaluation", evaluation), ("validation", validation), ("train", train)):
        unique: dict[str, Conversation] = {}
        for prompt in prompts:
            content = content_hash(prompt.messages, 32)
            if content in owner:
                reason = f"{split}_prompt_also_in_{owner[content]}" if owner[content] != split else f"{split}_repeated"
                dropped[reason] = dropped.get(reason, 0) + 1
                continue
            if prompt.id in unique:
                raise ValueError(f"{split}: two different prompts have the id {prompt.id!r}; ids must be unique")
            owner[content] = split
            unique[prompt.id] = prompt
        kept[split] = tuple(unique.values())
    return Splits(kept["train"], kept["validation"], kept["evaluation"], dropped)


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


def _check_message(message: Any, index: int) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"message {index} must be an object with 'role' and 'content', not {message!r:.80}")
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise ValueError(f"message {index}: {name!r} must be a string, not {message.get(name)!r:.80}")
