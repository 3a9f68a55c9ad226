"""A few prompts of an evaluation token by token: what was drafted, what stood, how sure the drafter was. For people."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dspark_lab.records import Trace, VerifyStep

EXAMPLES_FILE = "examples.json"


@dataclass(frozen=True, slots=True)
class ExampleStep:
    """One verify step in text. ``drafts`` are the tokens offered, the first ``num_accepted`` of which stood; ``bonus`` is
    the target's own token after them, empty where the answer had ended. ``confidence`` is that of each draft."""

    drafts: tuple[str, ...]
    num_accepted: int
    bonus: str
    confidence: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt. ``first`` is the token that prefill wrote. ``origin``: measured or replayed."""

    prompt_id: str
    domain: str
    origin: str
    prompt: str
    first: str
    steps: tuple[ExampleStep, ...]

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(step.num_accepted for step in self.steps) / max(len(self.steps), 1)


def choose(traces: Sequence[Trace], num_examples: int) -> list[Trace]:
    """The first of each domain, then the second of each, and so on."""
    seen: dict[str, int] = {}
    turn = []
    for index, trace in enumerate(traces):
        seen[trace.domain] = seen.get(trace.domain, 0) + 1
        turn.append((seen[trace.domain], index))
    return [traces[index] for _, index in sorted(turn)[:num_examples]]


def explain(trace: Trace, *, prompt: str, origin: str, piece: Callable[[int], str]) -> Example:
    """``trace`` in text; it has its tokens. ``piece`` is the text of one token."""
    assert trace.token_ids is not None
    steps, position = [], 1
    for step in trace.steps:
        position += step.num_accepted
        bonus = piece(trace.token_ids[position]) if position < len(trace.token_ids) else ""
        position += 1
        steps.append(_step(step, bonus, piece))
    return Example(trace.prompt_id, trace.domain, origin, prompt, piece(trace.token_ids[0]), tuple(steps))


def save_examples(folder: Path, examples: Sequence[Example]) -> None:
    text = json.dumps([asdict(example) for example in examples], indent=1, ensure_ascii=False)
    (folder / EXAMPLES_FILE).write_text(text + "\n", encoding="utf-8")


def read_examples(folder: Path) -> tuple[Example, ...]:
    """Empty where no evaluation left any. ValueError for a file that is none of ours."""
    path = folder / EXAMPLES_FILE
    if not path.exists():
        return ()
    try:
        return tuple(_example(entry) for entry in json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: not readable as examples: {error}: evaluate again") from error


def _step(step: VerifyStep, bonus: str, piece: Callable[[int], str]) -> ExampleStep:
    return ExampleStep(tuple(map(piece, step.draft_token_ids or ())), step.num_accepted, bonus, step.confidence)


def _example(entry: Mapping) -> Example:
    steps = [{**step, "drafts": tuple(step["drafts"])} for step in entry["steps"]]
    made = [ExampleStep(**{**s, "confidence": s["confidence"] and tuple(s["confidence"])}) for s in steps]
    return Example(**{**entry, "steps": tuple(made)})
