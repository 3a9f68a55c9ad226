"""Traces on disk: one JSON line a prompt and origin, every verify step at full width."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from dspark_lab.records import Trace, VerifyStep


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
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if line.pop("origin") == origin]
    if not found:
        mode = {"measured": "decode", "replayed": "replay"}.get(origin, origin)
        raise ValueError(f"{path} holds no {origin} traces: evaluate with evaluate.mode={mode}, or use another origin")
    return [Trace(**(line | {"steps": tuple(map(_step, line["steps"]))})) for line in found]


def _step(values: Mapping) -> VerifyStep:
    confidence = values["confidence"]
    return VerifyStep(**(values | {"confidence": None if confidence is None else tuple(confidence)}))
