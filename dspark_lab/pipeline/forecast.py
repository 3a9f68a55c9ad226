"""``sweep.dry=true``: what each job would find, what it would add, and how long that took before. Nothing is done."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dspark_lab.data.answers import Assignment
from dspark_lab.pipeline.conversations import packaged
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.sweep import in_sweep
from dspark_lab.progress import console
from dspark_lab.records import content_hash
from dspark_lab.report.results import RESULTS_FILE, Results, RunInfo, read_results
from dspark_lab.report.table import duration_text
from dspark_lab.run import Run
from dspark_lab.target.chat import tokenize_prompt
from dspark_lab.training.checkpoints import checkpoint_step, first_whole
from dspark_lab.training.place import Place


@dataclass(slots=True)
class Planned:
    """What the jobs before, in this process, would leave: content addresses, and the sums."""

    answers: set[str] = field(default_factory=set)
    states: set[str] = field(default_factory=set)
    steps: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    time_s: float = 0.0


PLANNED = Planned()


@dataclass(frozen=True, slots=True)
class Need:
    """Of one kind: how many are there, how many an earlier job of the sweep would leave, how many are to be made."""

    there: int
    shared: int
    to_make: int
    num_tokens: int

    def __str__(self) -> str:
        shared = f", {self.shared} by an earlier job" if self.shared else ""
        return f"{self.there} there{shared}, {self.to_make} to make"


def forecast(config: DictConfig, info: RunInfo, stages: Sequence[str]) -> None:
    """One paragraph for this job."""
    run = Run(info.name, Path(config.run.root) / info.name, info.config_hash)
    told, time_s, unknown = [], 0.0, []
    pace = Pace.of(Path(config.run.root), info)
    with closing(Parts(config, run, info, Place.of())) as parts:
        if {"regenerate", "capture"} & set(stages):
            answers, states = needs(parts)
            num_bytes = states.num_tokens * parts.manifest.bytes_per_token
            told += [
                f"answers: {answers}{_shipped(parts, answers)}",
                f"states: {states}, at most {num_bytes / 2**20:,.0f} MiB",
            ]
            PLANNED.num_bytes += num_bytes
            for stage, need, rate in (("regenerate", answers, pace.regenerate), ("capture", states, pace.capture)):
                if need.to_make and rate:
                    time_s += need.num_tokens / rate
                elif need.to_make:
                    unknown.append(stage)
    if "train" in stages:
        done = max(_trained_steps(run), PLANNED.steps.get(info.name, 0))
        left = max(config.trainer.max_steps - done, 0)
        PLANNED.steps[info.name] = done + left
        told.append(f"training: {done} of {config.trainer.max_steps} steps there")
        if pace.step_s:
            time_s += left * pace.step_s
        else:
            unknown.append("train")
    for stage in stages:
        if stage in ("regenerate", "capture", "train"):
            continue
        if stage in pace.stages:
            time_s += pace.stages[stage]
        else:
            unknown.append(stage)
    PLANNED.time_s += time_s
    left_out = f" without {', '.join(unknown)}, of which no earlier run is here" if unknown else ""
    console.print(f"[bold]job {HydraConfig.get().job.num if in_sweep() else 0}[/bold] -> {run.directory}")
    for line in [*told, f"time: about {duration_text(time_s)}{left_out}"]:
        console.print(f"  {line}")
    total = f"at most {PLANNED.num_bytes / 2**20:,.0f} MiB of states, about {duration_text(PLANNED.time_s)}"
    console.print(f"  with the jobs before: {total}")


def needs(parts: Parts) -> tuple[Need, Need]:
    """(answers, states) of the run, each conversation once. Tokens of what is not written yet are upper bounds."""
    spec = parts.target.spec
    book_is_there = (parts.home / "answers" / f"{spec.fingerprint}-{spec.template_hash}.jsonl").exists()
    stored = parts.store.keys() if (parts.home / "states" / parts.manifest.content_hash).exists() else ()
    there = set(stored) if parts.info.choices["store"] == "disk" else set()
    assignments = [entry for split in parts.conversations.assigned.values() for entry in split]
    missing = [entry for entry in assignments if not book_is_there or parts.conversations.answer(entry) is None]
    target = content_hash([spec.fingerprint, spec.template_hash])
    unwritten = {_address(entry, target): entry for entry in missing if entry.sampling is not None}
    answers = _need(len(assignments) - len(missing), unwritten, parts, PLANNED.answers, answer_only=True)
    if missing:
        return answers, _need(0, {_address(entry, target): entry for entry in assignments}, parts, PLANNED.states)
    known = {c.key: len(c) for split in parts.conversations.tokenized.values() for c in split}
    new = {key: length for key, length in known.items() if key not in there | PLANNED.states}
    shared = len(known.keys() & (PLANNED.states - there))
    PLANNED.states.update(new)
    return answers, Need(len(known.keys() & there), shared, len(new), sum(new.values()))


def _need(
    there: int, wanted: dict[str, Assignment], parts: Parts, planned: set[str], *, answer_only: bool = False
) -> Need:
    new = [entry for address, entry in wanted.items() if address not in planned]
    planned.update(wanted)
    answered = [(entry.prompt, entry.sampling) for entry in new if entry.sampling is not None]
    num_tokens = sum(sampling.max_new_tokens for _, sampling in answered)
    if not answer_only:
        tokenizer, thinking = parts.target.tokenizer, parts.corpus.enable_thinking
        num_tokens += sum(
            len(tokenize_prompt(prompt.messages, tokenizer, enable_thinking=thinking)) for prompt, _ in answered
        )
    return Need(there, len(wanted) - len(new), len(new), num_tokens)


def _address(entry: Assignment, target: str) -> str:
    sampling = entry.sampling and asdict(entry.sampling)
    return content_hash([target, list(map(dict, entry.prompt.messages)), sampling, entry.sample_index], 24)


def _shipped(parts: Parts, answers: Need) -> str:
    name = parts.corpus.packaged_answers
    return f" (or taken from those shipped: {packaged(name).name})" if name and answers.to_make else ""


def _trained_steps(run: Run) -> int:
    last, _ = first_whole(run.checkpoints)
    return 0 if last is None else checkpoint_step(last)


@dataclass(frozen=True, slots=True)
class Pace:
    """Tokens/s, seconds a step and seconds a stage, of the newest run below a root with the same target (and drafter)."""

    regenerate: float | None = None
    capture: float | None = None
    step_s: float | None = None
    stages: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path, info: RunInfo) -> "Pace":
        files = sorted(root.glob(f"*/{RESULTS_FILE}"), key=lambda file: file.stat().st_mtime)
        found = [read_results(file.parent) for file in files]
        same = [entry for entry in found if entry.run.choices.get("target") == info.choices["target"]]
        alike = [entry for entry in same if entry.run.choices.get("drafter") == info.choices["drafter"]]
        steps, time_s = _newest(alike, "num_train_steps"), _newest(alike, "train_time_s")
        return cls(
            _newest(same, "regenerate_tokens_per_s"),
            _newest(same, "capture_tokens_per_s"),
            time_s / steps if time_s and steps else None,
            {stage.name: stage.time_s for entry in alike for stage in entry.stages if not stage.error},
        )


def _newest(found: Sequence[Results], name: str) -> float | None:
    values = [metric.value for results in found for metric in results.metrics if metric.name == name]
    return values[-1] if values else None
