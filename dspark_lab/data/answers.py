"""The target's regenerated answers on disk: content-addressed, append-only, resumable; and how each is sampled."""

import fcntl
import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from dspark_lab.records import Conversation, Message, Sampling, content_hash
from dspark_lab.validation import checked


@dataclass(frozen=True, slots=True)
class Assignment:
    """One answer to be had: ``sample_index`` counts the earlier ones of this prompt with the same sampling.

    Without a sampling the conversation brings its own answer.
    """

    prompt: Conversation
    sampling: Sampling | None = None
    sample_index: int = 0


class SamplingMix:
    """Which sampling each answer is drawn with: ``samples_per_prompt`` answers to a prompt, samplings in turn.

    The prompt at position p of its source is answered with samplings p, p + 1, ... (cyclically): [greedy, T=0.7] answers
    every second prompt at T=0.7. Positions are those before anything is dropped, so that a prompt keeps its sampling
    when another one goes. Further samples have ids of their own, ``<id>/sample-<k>``, and so their own random streams.
    """

    @checked
    def __init__(self, *, samplings: tuple[Sampling, ...], samples_per_prompt: int = 1) -> None:
        if not samplings:
            raise ValueError("samplings: empty; list at least one Sampling (temperature: 0 is greedy)")
        if samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt={samples_per_prompt}: must be at least 1")
        self.samplings = samplings
        self.samples_per_prompt = samples_per_prompt
        if any(sum(sampling.greedy for sampling in self._drawn(start)) > 1 for start in range(len(samplings))):
            raise ValueError(
                f"samples_per_prompt={samples_per_prompt}: of {len(samplings)} samplings in turn, a prompt would get the "
                "same greedy answer twice; list more sampled ones (the same sampling may stand several times)"
            )

    def assign(self, prompts: Sequence[Conversation], *, positions: Sequence[int]) -> list[Assignment]:
        """The answers to be had, the samples of a prompt together; ``positions`` are ``Splits.train_positions``."""
        assigned = []
        for prompt, position in zip(prompts, positions, strict=True):
            drawn = self._drawn(position)
            for k, sampling in enumerate(drawn):
                sample = replace(prompt, id=f"{prompt.id}/sample-{k}") if k else prompt
                assigned.append(Assignment(sample, sampling, drawn[:k].count(sampling)))
        return assigned

    def _drawn(self, position: int) -> list[Sampling]:
        return [self.samplings[(position + k) % len(self.samplings)] for k in range(self.samples_per_prompt)]


@dataclass(frozen=True, slots=True)
class Seeding:
    """What ``AnswerBook.seed_from`` took over; ``refused`` says why it took nothing."""

    num_copied: int
    refused: str | None = None


class AnswerBook:
    """Answers of one target (weights and template) in ``<folder>/<fingerprint>-<template_hash>.jsonl``.

    The first line is a header, every other one a conversation with ``answer_token_ids``. Lines are appended and synced
    batch by batch; a line torn by a killed writer is cut off at the next start and its prompt regenerated. An answer is
    found by the prompt's messages, the sampling and a sample index, never by id: equal prompts share it.
    Several processes may append at once. Raises ValueError naming file and line when a complete line cannot be read.
    """

    def __init__(self, folder: Path, *, fingerprint: str, template_hash: str) -> None:
        self.header = {"kind": "header", "fingerprint": fingerprint, "template_hash": template_hash}
        self.path = folder / f"{fingerprint}-{template_hash}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        with self._locked() as file:
            self._cut_torn_line(file)
            if file.seek(0, os.SEEK_END) == 0:
                _append(file, [self.header])
            self._offsets = self._index(file)

    def __len__(self) -> int:
        return len(self._offsets)

    def get(self, prompt: Conversation, sampling: Sampling, *, sample_index: int = 0) -> Conversation | None:
        """``prompt`` (its id and domain) with the recorded answer, or None when it is still to be regenerated."""
        offset = self._offsets.get(_key(prompt.messages, sampling, sample_index))
        if offset is None:
            return None
        with self.path.open("rb") as file:
            file.seek(offset)
            answer = _from_row(json.loads(file.readline()))
        return replace(prompt, answer_token_ids=answer.answer_token_ids, sampling=answer.sampling, finish=answer.finish)

    def add(self, conversations: Iterable[Conversation], *, sample_index: int = 0) -> None:
        """Append regenerated conversations that are not there yet; on disk when it returns."""
        rows = [_to_row(conversation, sample_index) for conversation in conversations]
        self._add_rows([row for row in rows if _row_key(row) not in self._offsets])

    def seed_from(self, packaged: Path) -> Seeding:
        """Copy the answers of a packaged ``.jsonl.gz`` (``export``) when its header names this very target."""
        rows = _read_packaged(packaged)
        header = rows[0] if rows else {}
        for name in ("kind", "fingerprint", "template_hash"):
            if header.get(name) != self.header[name]:
                reason = f"{packaged.name} has {name} {header.get(name)!r}, this target {self.header[name]!r}"
                return Seeding(0, refused=reason)
        new = [row for row in rows[1:] if _row_key(row) not in self._offsets]
        self._add_rows(new)
        return Seeding(len(new))

    def export(self, packaged: Path, *, provenance: Mapping[str, str]) -> None:
        """Write all answers as a ``.jsonl.gz`` to ship, the same bytes for the same answers."""
        with self.path.open("rb") as file:
            rows = [json.loads(line) for line in file][1:]
        rows.sort(key=lambda row: (row["domain"], row["id"], _row_key(row)))
        lines = [_line({**self.header, **provenance})] + [_line(row) for row in rows]
        packaged.write_bytes(gzip.compress(b"".join(lines), mtime=0))

    def _add_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        with self._locked() as file:
            self._cut_torn_line(file)
            for row, offset in zip(rows, _append(file, rows), strict=True):
                self._offsets.setdefault(_row_key(row), offset)

    def _locked(self) -> BinaryIO:
        # The lock lives as long as the file is open.
        file = self.path.open("a+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    def _cut_torn_line(self, file: BinaryIO) -> None:
        size = file.seek(0, os.SEEK_END)
        complete = size
        while complete > 0:
            start = max(complete - 65536, 0)
            file.seek(start)
            newline = file.read(complete - start).rfind(b"\n")
            if newline >= 0:
                complete = start + newline + 1
                break
            complete = start
        if complete < size:
            file.truncate(complete)

    def _index(self, file: BinaryIO) -> dict[str, int]:
        offsets: dict[str, int] = {}
        file.seek(0)
        offset = 0
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                if number > 1:
                    offsets.setdefault(_row_key(row), offset)
                elif row != self.header:
                    raise ValueError(f"expected the header {self.header}")
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number}: {error!r}; delete the file to regenerate it") from error
            offset += len(line)
        return offsets


def _key(messages: Sequence[Message], sampling: Sampling, sample_index: int) -> str:
    return content_hash([list(messages), sampling, sample_index], 32)


def _row_key(row: Mapping[str, Any]) -> str:
    return _key(row["messages"], Sampling(**row["sampling"]), row.get("sample_index", 0))


def _to_row(conversation: Conversation, sample_index: int) -> dict[str, Any]:
    if conversation.answer_token_ids is None or conversation.sampling is None:
        raise ValueError(f"conversation {conversation.id!r} is not regenerated: it has no answer_token_ids or sampling")
    row = {
        "id": conversation.id,
        "messages": [dict(message) for message in conversation.messages],
        "domain": conversation.domain,
        "answer_token_ids": list(conversation.answer_token_ids),
        "sampling": asdict(conversation.sampling),
        "finish": conversation.finish,
    }
    return row | {"sample_index": sample_index} if sample_index else row


def _from_row(row: Mapping[str, Any]) -> Conversation:
    return Conversation(
        id=row["id"],
        messages=tuple(row["messages"]),
        domain=row["domain"],
        answer_token_ids=tuple(row["answer_token_ids"]),
        sampling=Sampling(**row["sampling"]),
        finish=row["finish"],
    )


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _append(file: BinaryIO, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Append and sync; the byte offset of each row."""
    offset = file.seek(0, os.SEEK_END)
    offsets = []
    lines = [_line(row) for row in rows]
    for line in lines:
        offsets.append(offset)
        offset += len(line)
    file.write(b"".join(lines))
    file.flush()
    os.fsync(file.fileno())
    return offsets


def _read_packaged(packaged: Path) -> list[dict[str, Any]]:
    with gzip.open(packaged, "rb") as lines:
        return [json.loads(line) for line in lines]
