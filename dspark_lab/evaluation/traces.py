"""Traces on disk: one JSON line a prompt and origin, every verify step at full width."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark_lab.records import Trace, VerifyStep

TRACES_FILE = "traces.jsonl"
GATE_TRACES_FILE = "gate_traces.jsonl"


def save_traces(path: Path, traces: Mapping[str, Sequence[Trace]]) -> None:
    """``traces`` by origin (measured, replayed)."""
    with path.open("w", encoding="utf-8") as file:
        for origin, found in traces.items():
            for trace in found:
                file.write(json.dumps({"origin": origin, **asdict(trace)}) + "\n")


def read_traces(path: Path, *, origin: str) -> list[Trace]:
    """The traces of one origin, in the order of the file.

    Raises:
        ValueError: no such file, or none of that origin in it.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: add evaluate to stages")
    found = read_all_traces(path)
    if origin not in found:
        mode = {"measured": "decode", "replayed": "replay"}.get(origin, origin)
        raise ValueError(f"{path} holds no {origin} traces: evaluate with evaluate.mode={mode}, or use another origin")
    return list(found[origin])


def read_all_traces(path: Path) -> dict[str, tuple[Trace, ...]]:
    """By origin, in the order of the file; empty without a file. ValueError names a line that is no trace."""
    found: dict[str, list[Trace]] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            found.setdefault(line.pop("origin"), []).append(_trace(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: no trace ({error}): evaluate again") from error
    return {origin: tuple(traces) for origin, traces in found.items()}


def _trace(values: Mapping[str, Any]) -> Trace:
    token_ids = values.get("token_ids")
    steps = tuple(map(_step, values["steps"]))
    return Trace(**{**values, "steps": steps, "token_ids": None if token_ids is None else tuple(token_ids)})


def _step(values: Mapping[str, Any]) -> VerifyStep:
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return VerifyStep(**plain)
