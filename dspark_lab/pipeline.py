"""The way through: prompts -> regenerate -> capture -> train -> evaluate -> report.

The only module that knows the Hydra config and builds objects from it. Each stage is a function of its config and of what
lies on disk; it can be run alone, goes on where a killed one stopped, and adds its numbers to the run's ``results.json``.
"""

import json
import logging
import shlex
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError

from dspark_lab.data.answers import AnswerBook
from dspark_lab.data.corpus import Corpus
from dspark_lab.data.datamodule import HiddenStateDataModule
from dspark_lab.data.packing import SampleOutline
from dspark_lab.data.prompts import Splits, disjoint
from dspark_lab.data.vocabulary import DraftVocabulary, build_draft_vocabulary, count_supervised_tokens
from dspark_lab.drafter.base import Borrowed, Drafter, Recipe
from dspark_lab.evaluation.acceptance import acceptance_metrics
from dspark_lab.evaluation.decode import evaluate_decode
from dspark_lab.evaluation.recipe import Benchmark, Evaluation
from dspark_lab.evaluation.replay import evaluate_replay
from dspark_lab.progress import console, track
from dspark_lab.records import Conversation, Metric, Sampling, TokenizedConversation, Trace
from dspark_lab.report.html import write_report
from dspark_lab.report.lightning_logger import JsonLinesLogger
from dspark_lab.report.metrics_log import read_metrics
from dspark_lab.report.results import RunInfo, StageRecord, update_results
from dspark_lab.report.vocabulary import metric
from dspark_lab.run import Run, name_run, open_run
from dspark_lab.store.protocol import HiddenStateStore, Manifest
from dspark_lab.target.chat import tokenize
from dspark_lab.target.protocol import Target
from dspark_lab.training.callbacks import Accounting, StepProgress, StopOnNonFiniteLoss

log = logging.getLogger(__name__)

STAGES = ("regenerate", "capture", "train", "evaluate", "report")


def run(config: DictConfig) -> float | None:
    """Carry out ``config.stages`` in order; returns the acceptance length (for sweepers), if it was evaluated."""
    quieten()
    stages = requested_stages(config.stages)
    if stages == ["report"] and config.report.runs:
        compare(config)
        return None
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    choices = {str(group): str(choice) for group, choice in HydraConfig.get().runtime.choices.items()}
    name, config_hash = name_run(resolved, experiment=choices.get("experiment"), drafter=choices["drafter"])
    L.seed_everything(config.seed, workers=True, verbose=False)
    with open_run(
        Path(config.run.root), name=config.run.name or name, config_hash=config_hash, fresh=config.run.fresh
    ) as opened:
        info = RunInfo(
            name=opened.name,
            choices={group: choice for group, choice in choices.items() if not group.startswith("hydra/")},
            config=resolved,
            config_hash=config_hash,
            command=shlex.join(["python", "-m", "dspark_lab", *HydraConfig.get().overrides.task]),
            seed=config.seed,
        )
        with closing(Pipeline(config, opened, info)) as pipeline:
            return pipeline.run(stages)


def quieten() -> None:
    """Advertisements, second progress bars and known noise of the libraries; their warnings stay."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)  # Lightning 2.6 on torch 2.13
    warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty")  # a resumed run


def requested_stages(stages: Any) -> list[str]:
    """One name or a list, in the order of the way through. ValueError for a name that is no stage."""
    names = [stages] if isinstance(stages, str) else list(stages)
    unknown = [name for name in names if name not in STAGES]
    if unknown or not names:
        raise ValueError(f"stages={names}: choose from {', '.join(STAGES)}; several as 'stages=[evaluate,report]'")
    return [name for name in STAGES if name in names]


class Pipeline:
    """Objects of one run, built from the config when a stage first needs them, and the stages themselves."""

    def __init__(self, config: DictConfig, opened: Run, info: RunInfo) -> None:
        self.config, self.run_, self.info = config, opened, info
        self.home = Path(config.home).expanduser()
        self.corpus: Corpus = build(config, "data")
        self.benchmark: Benchmark = build(config, "benchmark")
        self.evaluation: Evaluation = build(config, "evaluate")

    def close(self) -> None:
        """Publish what the store still buffers."""
        if "store" in self.__dict__:
            self.store.close()

    # --- the stages -------------------------------------------------------------------------------------------------

    def run(self, stages: Sequence[str]) -> float | None:
        if self.config.about:
            console.print(self.config.about)
        console.print(f"[bold]{self.run_.name}[/bold]: {' -> '.join(stages)} in {self.run_.directory}")
        OmegaConf.save(self.config, self.run_.directory / "config.yaml", resolve=True)
        acceptance = None
        for stage in stages:
            started = time.monotonic()
            try:
                record, metrics = getattr(self, stage)()
            except Exception as error:
                failed = StageRecord(stage, time.monotonic() - started, error=str(error) or repr(error))
                update_results(self.run_.directory, run=self.info, stage=failed)
                raise
            record = {"time_s": time.monotonic() - started, **record}
            update_results(self.run_.directory, run=self.info, stage=StageRecord(stage, **record), metrics=metrics)
            if stage == "evaluate":
                acceptance = next(entry.value for entry in metrics if entry.name == "acceptance_length")
        return acceptance

    def regenerate(self) -> tuple[dict[str, Any], list[Metric]]:
        """The target answers every prompt that has no recorded answer yet."""
        assigned = [pair for split in self.assigned.values() for pair in split]
        events: dict[str, int] = {}
        if self.corpus.regenerate and self.corpus.packaged_answers:
            seeding = self.book.seed_from(packaged(self.corpus.packaged_answers))
            if seeding.refused:
                console.print(f"shipped answers are not used: {seeding.refused}")
            elif seeding.num_copied:
                events["taken from the shipped answers"] = seeding.num_copied
            if seeding.num_copied and self.corpus.num_checked:
                events |= self._check_packaged()
        missing = [(p, s) for p, s in assigned if s is not None and self.book.get(p, s) is None]
        known = len(assigned) - len(missing)
        if known:
            console.print(f"regenerate: {known} of {len(assigned)} answers are there already")
        metrics = self._answer(missing)
        conversations = [c for split in self.conversations.values() for c in split]
        lengths = sum(c.finish == "length" for c in conversations)
        if lengths:
            events["stopped by max_new_tokens"] = lengths
        events["regenerated"] = len(missing)
        return {"num_in": len(assigned), "num_out": len(conversations), "events": events}, metrics

    def capture(self) -> tuple[dict[str, Any], list[Metric]]:
        """The target's states of every conversation that the store does not hold yet."""
        store, wanted = self.store, {c.key: c for split in self.tokenized.values() for c in split}
        given = sum(len(split) for split in self.tokenized.values())
        there = set(store.keys())
        missing = [conversation for key, conversation in wanted.items() if key not in there]
        num_tokens = sum(len(conversation) for conversation in missing)
        size = store.estimate_bytes(num_tokens, num_samples=len(missing))
        console.print(
            f"capture: {len(wanted) - len(missing)} of {len(wanted)} conversations are there already; "
            f"{num_tokens} tokens, {size / 2**20:.0f} MiB to come"
        )
        store.ensure_room(size)
        started = time.monotonic()
        for key, sample in track(self.target.capture(missing), "capture", total=len(missing)):
            store.put(key, sample)
        store.sync()
        supervised = sum(int(conversation.loss_mask.sum()) for conversation in wanted.values())
        metrics = [
            metric("num_conversations", len(wanted), origin="measured"),
            metric("num_supervised_tokens", supervised, origin="measured"),
            metric("stored_bytes", store.estimate_bytes(sum(map(len, wanted.values())), num_samples=len(wanted)),
                   origin="measured"),
        ]  # fmt: skip
        if missing:
            speed = num_tokens / (time.monotonic() - started)
            metrics.append(metric("capture_tokens_per_s", speed, origin="measured"))
        dropped = {"same content as another conversation": given - len(wanted)} if given > len(wanted) else {}
        events = {"captured": len(missing), "already in the store": len(wanted) - len(missing)}
        return {"num_in": given, "num_out": len(wanted), "dropped": dropped, "events": events}, metrics

    def train(self) -> tuple[dict[str, Any], list[Metric]]:
        """Fit the drafter; a checkpoint of an earlier try is gone on from."""
        data = self.datamodule
        drafter = self.drafter
        accounting = Accounting()
        replayed = build(
            self.config,
            "callbacks",
            conversations=self.tokenized["validation"],
            read_sample=self.store.get,
            seed=self.config.seed,
        )
        loggers = [
            JsonLinesLogger(directory=self.run_.directory),
            build(self.config, "logger", run_dir=self.run_.directory, run_name=self.run_.name),
        ]
        trainer: L.Trainer = build(
            self.config,
            "trainer",
            run_dir=self.run_.directory,
            loggers=loggers,
            callbacks=[accounting, replayed, StopOnNonFiniteLoss(), StepProgress()],
        )
        last = self.run_.checkpoints / "last.ckpt"
        if last.exists():
            console.print(f"train: going on from step {checkpoint_step(last)} of {trainer.max_steps} ({last})")
        trainer.fit(drafter, datamodule=data, ckpt_path=last if last.exists() else None, weights_only=True)
        counts = data.train_counts
        metrics = [
            metric("num_parameters", sum(p.numel() for p in drafter.parameters()), origin="measured"),
            metric("num_train_steps", trainer.global_step, origin="measured"),
            metric("num_train_tokens", accounting.tokens, origin="measured"),
            metric("train_time_s", training_time_s(self.run_.directory), origin="measured"),
            metric("draft_vocabulary_coverage", self.coverage, origin="measured"),
        ]
        dropped = {
            "no supervised token": counts.skipped_without_supervised_tokens,
            "supervised only beyond row_tokens": counts.skipped_by_truncation,
            "same content as another conversation": counts.duplicates,
        }
        return {
            "num_in": len(self.tokenized["train"]),
            "num_out": counts.num_samples,
            "dropped": {reason: count for reason, count in dropped.items() if count},
            "events": {"truncated to row_tokens": counts.truncated} if counts.truncated else {},
        }, metrics

    def evaluate(self) -> tuple[dict[str, Any], list[Metric]]:
        """Acceptance of the trained drafter on the benchmark's prompts, by replay and by real decoding."""
        drafter, checkpoint = self._trained()
        recipe = self.evaluation
        num_draft_tokens = recipe.num_draft_tokens or drafter.num_draft_tokens
        prompts = self.tokenized["evaluation"]
        setting = {
            "benchmark": self.benchmark.name,
            "temperature": recipe.sampling.temperature,
            "top_k": recipe.sampling.top_k,
            "top_p": recipe.sampling.top_p,
            "max_new_tokens": recipe.sampling.max_new_tokens,
            "num_draft_tokens": num_draft_tokens,
            "engine": self.info.choices["engine"],
            "checkpoint": checkpoint,
        }
        metrics: list[Metric] = []
        traces: dict[str, Sequence[Trace]] = {}
        dropped: Mapping[str, int] = {}
        if "replay" in recipe.modes:
            replayed = evaluate_replay(
                drafter,
                self.store.get,
                prompts[: recipe.num_replay_prompts],
                sampling=recipe.sampling,
                num_draft_tokens=num_draft_tokens,
                target_head=drafter.target_head,
                eos_token_ids=self.target.spec.eos_token_ids,
                seed=recipe.seed,
                progress=track,
            )
            traces["replayed"], dropped = replayed.traces, replayed.refused
        if "decode" in recipe.modes:
            decoded = evaluate_decode(
                self.target,
                drafter,
                [prompt_only(conversation) for conversation in prompts[: recipe.num_decode_prompts]],
                sampling=recipe.sampling,
                num_draft_tokens=num_draft_tokens,
                seed=recipe.seed,
                progress=track,
            )
            traces["measured"] = decoded.traces
            metrics += loop_metrics(decoded, setting)
        for origin, found in traces.items():
            metrics += acceptance_metrics(found, setting=setting, origin=origin, seed=recipe.seed)
        save_traces(self.run_.traces, traces)
        counted = traces.get("replayed", traces.get("measured", ()))
        record = {"num_in": len(counted) + sum(dropped.values()), "num_out": len(counted), "dropped": dropped}
        return {**record, "unit": "prompts"}, metrics

    def report(self) -> tuple[dict[str, Any], list[Metric]]:
        compare(self.config, self.run_)
        return {}, []

    # --- what the stages share --------------------------------------------------------------------------------------

    @cached_property
    def target(self) -> Target:
        return build(self.config, "engine")

    @cached_property
    def splits(self) -> Splits:
        found = disjoint(train=self.corpus.train, validation=self.corpus.validation, evaluation=self.benchmark.prompts)
        for reason, count in found.dropped.items():
            console.print(f"prompts: {count} dropped ({reason})")
        return found

    @cached_property
    def assigned(self) -> dict[str, list[tuple[Conversation, Sampling | None]]]:
        """Each split's prompts with the sampling of their answers; None where the conversation brings its own."""
        splits, mix = self.splits, self.corpus.mix
        return {
            "train": list(mix.assign(splits.train)) if mix else [(c, None) for c in splits.train],
            "validation": [(c, self.corpus.greedy if mix else None) for c in splits.validation],
            "evaluation": [(c, self.evaluation.sampling) for c in splits.evaluation],
        }

    @cached_property
    def book(self) -> AnswerBook:
        spec = self.target.spec
        return AnswerBook(self.home / "answers", fingerprint=spec.fingerprint, template_hash=spec.template_hash)

    @cached_property
    def conversations(self) -> dict[str, list[Conversation]]:
        answered = {}
        for split, pairs in self.assigned.items():
            found = [c if s is None else self.book.get(c, s) for c, s in pairs]
            answered[split] = [conversation for conversation in found if conversation is not None]
            if len(answered[split]) < len(pairs):
                raise ValueError(
                    f"{len(pairs) - len(answered[split])} of {len(pairs)} {split} prompts have no answer yet: add "
                    "regenerate to stages"
                )
        return answered

    @cached_property
    def tokenized(self) -> dict[str, list[TokenizedConversation]]:
        thinking = self.corpus.enable_thinking
        return {
            split: [tokenize(c, self.target.tokenizer, enable_thinking=thinking) for c in conversations]
            for split, conversations in self.conversations.items()
        }

    @cached_property
    def store(self) -> HiddenStateStore:
        engine = self.info.choices["engine"]
        manifest = Manifest.for_target(self.target.spec, engine=engine, dtype=self.config.capture.dtype)
        if self.info.choices["store"] == "memory":
            return build(self.config, "store", manifest=manifest)
        return build(self.config, "store", root=self.home / "states" / manifest.content_hash, manifest=manifest)

    @cached_property
    def vocabulary(self) -> DraftVocabulary:
        return build_draft_vocabulary(
            self.token_counts,
            vocab_size=self.target.spec.vocab_size,
            draft_vocab_size=self.corpus.draft_vocab_size,
        )

    @cached_property
    def token_counts(self) -> torch.Tensor:
        return count_supervised_tokens(self.tokenized["train"], vocab_size=self.target.spec.vocab_size)

    @property
    def coverage(self) -> float:
        return self.vocabulary.coverage(self.token_counts)

    @cached_property
    def datamodule(self) -> HiddenStateDataModule:
        return HiddenStateDataModule(
            store=self.store,
            train=[SampleOutline.of(conversation) for conversation in self.tokenized["train"]],
            validation=[SampleOutline.of(conversation) for conversation in self.tokenized["validation"]],
            row_tokens=self.corpus.row_tokens,
            rows_per_batch=self.corpus.rows_per_batch,
            num_workers=self.corpus.num_workers,
            prefetch_factor=self.corpus.prefetch_factor,
            seed=self.config.seed,
        )

    @cached_property
    def drafter(self) -> Drafter:
        recipe = Recipe(
            optimizer=build(self.config, "optimizer"),
            lr_schedule=build(self.config, "lr_schedule"),
            seed=self.config.seed,
        )
        borrowed = Borrowed(self.target.spec, self.target.head(), self.vocabulary)
        drafter = build(self.config, "drafter", borrowed=borrowed, recipe=recipe)
        return drafter.float()

    def _trained(self) -> tuple[Drafter, str]:
        """The drafter with the weights of the checkpoint to evaluate, and which one that is."""
        names = [self.evaluation.checkpoint, "last"]
        found = [name for name in names if (self.run_.checkpoints / f"{name}.ckpt").exists()]
        if not found:
            raise ValueError(f"{self.run_.checkpoints} holds no checkpoint: add train to stages")
        path = self.run_.checkpoints / f"{found[0]}.ckpt"
        self.drafter.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["state_dict"])
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return self.drafter.to(device).eval(), f"{found[0]}, step {checkpoint_step(path)}"

    def _answer(self, missing: Sequence[tuple[Conversation, Sampling]]) -> list[Metric]:
        started, num_tokens = time.monotonic(), 0
        for sampling in dict.fromkeys(sampling for _, sampling in missing):
            prompts = [prompt for prompt, wanted in missing if wanted == sampling]
            how = "greedy" if sampling.greedy else f"T={sampling.temperature:g}"
            answers = self.target.regenerate(prompts, sampling=sampling)
            for answer in track(answers, f"regenerate ({how})", total=len(prompts)):
                self.book.add([answer])
                num_tokens += len(answer.answer_token_ids or ())
        if not num_tokens:
            return []
        return [metric("regenerate_tokens_per_s", num_tokens / (time.monotonic() - started), origin="measured")]

    def _check_packaged(self) -> dict[str, int]:
        """Write some shipped greedy answers again; on other hardware a near tie may fall the other way."""
        greedy = [(p, s) for p, s in self.assigned["validation"] if s is not None and s.greedy]
        shipped = {p.id: self.book.get(p, s) for p, s in greedy if self.book.get(p, s) is not None}
        chosen = [p for p, _ in greedy if p.id in shipped][: self.corpus.num_checked]
        answers = self.target.regenerate(chosen, sampling=self.corpus.greedy)
        again = list(track(answers, "check of shipped answers", total=len(chosen)))
        same = sum(shipped[a.id].answer_token_ids == a.answer_token_ids for a in again)
        console.print(f"check: {same} of {len(again)} shipped answers were written again token for token")
        return {"checked against shipped": len(again), "differing from shipped": len(again) - same}


def build(config: DictConfig, key: str, **extra: Any) -> Any:
    """Instantiate ``config[key]``. Errors name the config key.

    Raises:
        ValueError: the constructor refused a value.
    """
    try:
        made: Callable[..., Any] = hydra.utils.instantiate(config[key], _convert_="all", _partial_=True)
        return made(**extra)
    except ValidationError as error:
        problems = [
            f"{key}.{'.'.join(map(str, problem['loc']))}={problem['input']!r}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise ValueError("; ".join(problems)) from error
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise ValueError(f"{str(error).rsplit('full_key: ', 1)[-1] or key}: {cause}") from error
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def packaged(name: str) -> Path:
    """Path of answers that ship with the package."""
    path = Path(str(files("dspark_lab"))) / "assets" / f"{name}.jsonl.gz"
    if not path.exists():
        shipped = ", ".join(sorted(p.name.removesuffix(".jsonl.gz") for p in path.parent.glob("*.jsonl.gz"))) or "none"
        raise ValueError(f"data.packaged_answers={name!r} is not shipped (there is: {shipped}); set it to null")
    return path


def prompt_only(conversation: TokenizedConversation) -> TokenizedConversation:
    """Everything before the last answer."""
    start = int(conversation.loss_mask.nonzero()[0])
    return TokenizedConversation(
        conversation.id, conversation.token_ids[:start], conversation.loss_mask[:start], conversation.domain
    )


def training_time_s(run_dir: Path) -> float:
    """Wall clock of training, the parts before a resume included."""
    return max((line["time_s"] for line in read_metrics(run_dir)), default=0.0)


def checkpoint_step(path: Path) -> int:
    return int(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"])


def loop_metrics(decoded: Any, setting: Mapping[str, Any]) -> list[Metric]:
    """Speed and text equality of real decoding."""
    found = []
    if decoded.mismatch_rate is not None:
        found.append(metric("greedy_mismatch_rate", decoded.mismatch_rate, origin="measured", setting=setting,
                            num_samples=len(decoded.traces)))  # fmt: skip
    if decoded.timing is not None:
        speeds = {
            "loop_tokens_per_s": decoded.timing.speculative_tokens_per_s,
            "loop_plain_tokens_per_s": decoded.timing.plain_tokens_per_s,
            "loop_speedup": decoded.timing.speedup,
        }
        found += [
            metric(name, value, origin="measured", setting=setting, num_samples=len(decoded.timing.prompts))
            for name, value in speeds.items()
        ]
    return found


def save_traces(path: Path, traces: Mapping[str, Sequence[Trace]]) -> None:
    """One JSON line a prompt and origin: every verify step at full width, for later stages."""
    with path.open("w", encoding="utf-8") as file:
        for origin, found in traces.items():
            for trace in found:
                file.write(json.dumps({"origin": origin, **asdict(trace)}) + "\n")


def compare(config: DictConfig, opened: Run | None = None) -> None:
    """Print and write the comparison of ``report.runs`` (or of the run at hand) into ``report.out`` (or its folder)."""
    runs = [Path(entry) for entry in config.report.runs] or ([opened.directory] if opened else [])
    out = Path(config.report.out) if config.report.out else (opened.directory if opened else Path(config.run.root))
    path = write_report(runs, out, title=opened.name if opened else "Comparison of drafters", console=console)
    if config.expect:
        console.print(config.expect)
    console.print(f"report: {path}")
