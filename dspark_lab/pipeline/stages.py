"""The stages. Each is a function of a run's parts and of what lies on disk; it can be run alone and taken up again.

They return what ``StageRecord`` says of a stage (accounting by reason) and the stage's metrics.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig

from dspark_lab.data.answers import Assignment
from dspark_lab.data.mixture import source_cards
from dspark_lab.data.overlap import NUM_WORDS
from dspark_lab.data.packing import PackingCounts
from dspark_lab.drafter.base import Drafter
from dspark_lab.evaluation.acceptance import acceptance_metrics
from dspark_lab.evaluation.decode import DecodeResult, evaluate_decode, prompt_only
from dspark_lab.evaluation.replay import evaluate_replay
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.callbacks import build_callbacks
from dspark_lab.pipeline.distributed import Outcome, must_launch, train_as_group
from dspark_lab.pipeline.export import write_export
from dspark_lab.pipeline.parts import Parts, packaged
from dspark_lab.progress import console, track
from dspark_lab.records import Conversation, Metric, Sampling, Trace
from dspark_lab.report.html import write_report
from dspark_lab.report.lightning_logger import JsonLinesLogger
from dspark_lab.report.metrics_log import read_metrics
from dspark_lab.report.vocabulary import metric
from dspark_lab.run import Run
from dspark_lab.training.accounting import Accounting, StepProgress
from dspark_lab.training.checkpoints import NEWEST_FIRST, checkpoint_step, first_whole
from dspark_lab.training.guards import SpikeGuard, StopOnNonFiniteLoss
from dspark_lab.training.loggers import finish_wandb


def regenerate(parts: Parts) -> Outcome:
    """The target answers every prompt that has no recorded answer yet."""
    assigned = [pair for split in parts.assigned.values() for pair in split]
    events: dict[str, int] = {}
    if parts.corpus.regenerate and parts.corpus.packaged_answers:
        seeding = parts.book.seed_from(packaged(parts.corpus.packaged_answers))
        if seeding.refused:
            console.print(f"shipped answers are not used: {seeding.refused}")
        elif seeding.num_copied:
            events["taken from the shipped answers"] = seeding.num_copied
        if seeding.num_copied and parts.corpus.num_checked:
            events |= _check_packaged(parts)
    missing = [assignment for assignment in assigned if parts.answer(assignment) is None]
    known = len(assigned) - len(missing)
    if known:
        console.print(f"regenerate: {known} of {len(assigned)} answers are there already")
    metrics = _answer(parts, missing) + _overlap(parts)
    conversations = [c for split in parts.conversations.values() for c in split]
    lengths = sum(c.finish == "length" for c in conversations)
    if lengths:
        events["stopped by max_new_tokens"] = lengths
    events["regenerated"] = len(missing)
    dropped = {**parts.splits.dropped, **parts.screened.dropped}
    num_in = len(assigned) + sum(parts.splits.dropped.values())
    return {"num_in": num_in, "num_out": len(conversations), "dropped": dropped, "events": events}, metrics


def capture(parts: Parts) -> Outcome:
    """The target's states of every conversation that the store does not hold yet."""
    store, wanted = parts.store, {c.key: c for split in parts.tokenized.values() for c in split}
    given = sum(len(split) for split in parts.tokenized.values())
    num_split = given + len(parts.unmaskable) - sum(map(len, parts.conversations.values()))
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
    if missing:  # else the target's weights need not be loaded at all
        for key, sample in track(parts.target.capture(missing), "capture", total=len(missing)):
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
    dropped = {
        "same content as another conversation": given - len(wanted),
        "cannot be masked with this template": len(parts.unmaskable),
    }
    events = {"captured": len(missing), "already in the store": len(wanted) - len(missing)}
    if num_split:
        events["further samples of conversations split by turn"] = num_split
    cards = source_cards(parts.corpus.train, parts.splits.train, parts.tokenized["train"])
    for card in cards:
        console.print(f"source {card.name}: {card.num_prompts} prompts, {card.num_tokens} tokens")
    return {
        "num_in": given + len(parts.unmaskable),
        "num_out": len(wanted),
        "dropped": {reason: count for reason, count in dropped.items() if count},
        "events": events,
        "sources": [asdict(card) for card in cards],
    }, metrics


def train(parts: Parts) -> Outcome:
    """Fit the drafter, as a group of processes where ``trainer`` asks for several ranks; a checkpoint is gone on from."""
    if must_launch(parts):
        return train_as_group(parts)
    data = parts.datamodule
    drafter = parts.drafter
    accounting = Accounting()
    # Without a recorded sampling nothing can be replayed.
    monitor = "val/acceptance_length" if parts.corpus.regenerate else "val/acceptance_length_estimate"
    watchers = [
        *build_callbacks(parts, monitor=monitor),
        accounting,
        StopOnNonFiniteLoss(run_dir=parts.run.directory),
        StepProgress(),
    ]
    loggers = [
        JsonLinesLogger(directory=parts.run.directory),
        build(parts.config, "logger", run_dir=parts.run.directory, run_name=parts.run.name),
    ]
    trainer: L.Trainer = build(
        parts.config,
        "trainer",
        run_dir=parts.run.directory,
        loggers=loggers,
        callbacks=watchers,
        monitor=monitor,
        seed=parts.config.seed,
    )
    last = _whole_checkpoint(parts, NEWEST_FIRST)
    if last is not None:
        console.print(f"train: going on from step {checkpoint_step(last)} of {trainer.max_steps} ({last})")
    for logger in loggers:
        logger.log_hyperparams(parts.info.config)
    used = used_samples(data.train_counts)
    told = [f"{count} {reason}" for reason, count in {**used["dropped"], **used["events"]}.items()]
    console.print(
        f"train: {used['num_out']} samples in {data.train_counts.num_rows} rows; {', '.join(told) or 'none dropped'}"
    )
    failed = True
    try:
        trainer.fit(drafter, datamodule=data, ckpt_path=last, weights_only=True)
        failed = False
    finally:
        finish_wandb(failed=failed)
    metrics = [
        metric("num_parameters", sum(p.numel() for p in drafter.parameters()), origin="measured"),
        metric("num_train_steps", trainer.global_step, origin="measured"),
        metric("num_train_tokens", accounting.tokens, origin="measured"),
        metric("train_time_s", training_time_s(parts.run.directory), origin="measured"),
        metric("draft_vocabulary_coverage", parts.coverage, origin="measured"),
        *(
            metric(f"train_{name}", rate, origin="measured")
            for name, rate in accounting.rates(accounting.totals).items()
        ),
    ]
    skipped = sum(watcher.num_skipped for watcher in watchers if isinstance(watcher, SpikeGuard))
    if skipped:
        used["events"]["steps skipped by the spike guard"] = skipped
    return {**used, "num_in": len(parts.tokenized["train"])}, metrics


def used_samples(counts: PackingCounts) -> dict[str, Any]:
    """What ``StageRecord`` says of the samples that are trained on, and of those that are not."""
    dropped = {
        "no supervised token": counts.skipped_without_supervised_tokens,
        "supervised only beyond row_tokens": counts.skipped_by_truncation,
        "same content as another conversation": counts.duplicates,
    }
    return {
        "num_out": counts.num_samples,
        "dropped": {reason: count for reason, count in dropped.items() if count},
        "events": {"truncated to row_tokens": counts.truncated} if counts.truncated else {},
    }


def evaluate(parts: Parts) -> Outcome:
    """Acceptance of the trained drafter on the benchmark's prompts, by replay and by real decoding."""
    drafter, checkpoint = _trained(parts)
    recipe = parts.evaluation
    num_draft_tokens = recipe.num_draft_tokens or drafter.num_draft_tokens
    prompts = parts.tokenized["evaluation"]
    setting = {
        "benchmark": parts.benchmark.name,
        "temperature": recipe.sampling.temperature,
        "top_k": recipe.sampling.top_k,
        "top_p": recipe.sampling.top_p,
        "max_new_tokens": recipe.sampling.max_new_tokens,
        "num_draft_tokens": num_draft_tokens,
        "engine": parts.info.choices["engine"],
        "checkpoint": checkpoint,
    }
    metrics: list[Metric] = []
    traces: dict[str, Sequence[Trace]] = {}
    dropped: Mapping[str, int] = {}
    if "replay" in recipe.modes:
        replayed = evaluate_replay(
            drafter,
            parts.store.get,
            prompts[: recipe.num_replay_prompts],
            sampling=recipe.sampling,
            num_draft_tokens=num_draft_tokens,
            target_head=drafter.target_head,
            eos_token_ids=parts.target.spec.eos_token_ids,
            seed=recipe.seed,
            progress=track,
        )
        traces["replayed"], dropped = replayed.traces, replayed.refused
    if "decode" in recipe.modes:
        decoded = evaluate_decode(
            parts.target,
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
    save_traces(parts.run.traces, traces)
    counted = traces.get("replayed", traces.get("measured", ()))
    record = {"num_in": len(counted) + sum(dropped.values()), "num_out": len(counted), "dropped": dropped}
    return {**record, "unit": "prompts"}, metrics


def export(parts: Parts) -> Outcome:
    """The drafter as a folder that inference engines load."""
    write_export(parts, *_trained(parts))
    return {}, []


def report(parts: Parts) -> Outcome:
    """The comparison of ``report.runs``, or this run alone."""
    compare(parts.config, parts.run)
    return {}, []


def compare(config: DictConfig, opened: Run | None = None) -> None:
    """Print and write the comparison of ``report.runs`` (or of the run at hand) into ``report.out`` (or its folder)."""
    runs = [Path(entry) for entry in config.report.runs] or ([opened.directory] if opened else [])
    out = Path(config.report.out) if config.report.out else (opened.directory if opened else Path(config.run.root))
    path = write_report(runs, out, title=opened.name if opened else "Comparison of drafters", console=console)
    if config.expect:
        console.print(config.expect)
    console.print(f"report: {path}")


def training_time_s(run_dir: Path) -> float:
    """Wall clock of training, the parts before a resume included."""
    return max((line["time_s"] for line in read_metrics(run_dir)), default=0.0)


def loop_metrics(decoded: DecodeResult, setting: Mapping[str, Any]) -> list[Metric]:
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


def _trained(parts: Parts) -> tuple[Drafter, str]:
    """The drafter with the weights of the checkpoint to evaluate, and which one that is."""
    path = _whole_checkpoint(parts, [f"{parts.evaluation.checkpoint}.ckpt", *NEWEST_FIRST])
    if path is not None:
        parts.drafter.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["state_dict"])
        name = f"{path.stem}, step {checkpoint_step(path)}"
    elif parts.imported is not None:
        name = f"imported from {parts.imported.source}"
    else:
        raise ValueError(
            f"{parts.run.checkpoints} holds no checkpoint: add train to stages, or name one with drafter.from_pretrained"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return parts.drafter.to(device).eval(), name


def _whole_checkpoint(parts: Parts, names: Sequence[str]) -> Path | None:
    found, damaged = first_whole(parts.run.checkpoints, names)
    for path in damaged:
        console.print(f"{path} is damaged (torn by a kill, or a fault of the disk) and is passed over")
    if damaged and found is None:
        raise ValueError(f"{parts.run.checkpoints}: no checkpoint is whole; start anew with run.fresh=true")
    return found


def _answer(parts: Parts, missing: Sequence[Assignment]) -> list[Metric]:
    started, num_tokens = time.monotonic(), 0
    rounds: dict[tuple[Sampling, int], list[Conversation]] = {}
    for assignment in missing:
        assert assignment.sampling is not None
        rounds.setdefault((assignment.sampling, assignment.sample_index), []).append(assignment.prompt)
    for (sampling, sample_index), prompts in rounds.items():
        how = "greedy" if sampling.greedy else f"T={sampling.temperature:g}"
        how += f", sample {sample_index + 1}" if sample_index else ""
        answers = parts.target.regenerate(prompts, sampling=sampling)
        for answer in track(answers, f"regenerate ({how})", total=len(prompts)):
            parts.book.add([answer], sample_index=sample_index)
            num_tokens += len(answer.answer_token_ids or ())
    if not num_tokens:
        return []
    return [metric("regenerate_tokens_per_s", num_tokens / (time.monotonic() - started), origin="measured")]


def _overlap(parts: Parts) -> list[Metric]:
    """How much of the training text stands in the benchmark's prompts."""
    setting = {"benchmark": parts.benchmark.name, "num_words": NUM_WORDS}
    found = {"train_prompt_overlap": parts.prompt_overlap, "train_answer_overlap": parts.screened.overlap}
    for name, count in found.items():
        kind = name.split("_")[1]
        console.print(
            f"overlap: {count.num_overlapping} of {count.num_compared} training {kind}s ({count.share:.1%}) share "
            f"{NUM_WORDS} words in a row with a prompt of {parts.benchmark.name}"
        )
    return [
        metric(name, count.share, origin="measured", setting=setting, num_samples=count.num_compared)
        for name, count in found.items()
    ]


def _check_packaged(parts: Parts) -> dict[str, int]:
    """Write some shipped greedy answers again; on other hardware a near tie may fall the other way."""
    greedy = parts.corpus.greedy
    prompts = [entry.prompt for split in parts.assigned.values() for entry in split if entry.sampling == greedy]
    found = [answer for prompt in prompts if (answer := parts.book.get(prompt, greedy)) is not None]
    shipped = {answer.id: answer.answer_token_ids for answer in found[: parts.corpus.num_checked]}
    chosen = [prompt for prompt in prompts if prompt.id in shipped]
    answers = parts.target.regenerate(chosen, sampling=greedy)
    again = list(track(answers, "check of shipped answers", total=len(chosen)))
    same = sum(shipped[answer.id] == answer.answer_token_ids for answer in again)
    console.print(f"check: {same} of {len(again)} shipped answers were written again token for token")
    return {"checked against shipped": len(again), "differing from shipped": len(again) - same}


STAGES: Mapping[str, Callable[[Parts], Outcome]] = {
    "regenerate": regenerate,
    "capture": capture,
    "train": train,
    "evaluate": evaluate,
    "export": export,
    "report": report,
}
"""In the order of the way through."""
