"""Stage *train*, and the trained drafter that later stages use."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from dspark_lab.data.packing import PackingCounts
from dspark_lab.drafter.base import Drafter
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.callbacks import build_callbacks, monitored
from dspark_lab.pipeline.distributed import Outcome, must_launch, train_as_group
from dspark_lab.pipeline.logged import logged_job
from dspark_lab.pipeline.parts import Parts
from dspark_lab.progress import console
from dspark_lab.report.lightning_logger import JsonLinesLogger
from dspark_lab.report.metrics_log import read_metrics
from dspark_lab.report.vocabulary import metric
from dspark_lab.target.precision import resolve_device
from dspark_lab.training.accounting import Accounting, StepProgress
from dspark_lab.training.checkpoints import LAST, NEWEST_FIRST, checkpoint_step, first_whole
from dspark_lab.training.guards import SpikeGuard, StopOnNonFiniteLoss
from dspark_lab.training.live import LiveWatch
from dspark_lab.training.loggers import finish_wandb
from dspark_lab.training.memory import forget_peak, peak_bytes


def train(parts: Parts) -> Outcome:
    """Fit the drafter, as a group of processes where ``trainer`` asks for several ranks; a checkpoint is gone on from."""
    if must_launch(parts):
        return train_as_group(parts)
    data = parts.datamodule
    drafter = parts.drafter
    accounting = Accounting()
    monitor = monitored(parts.config, replayable=parts.corpus.regenerate)
    watchers = [
        *build_callbacks(parts, monitor=monitor),
        accounting,
        StopOnNonFiniteLoss(run_dir=parts.run.directory),
        StepProgress(),
    ]
    watch = LiveWatch(parts.run.checkpoints / LAST) if parts.corpus.source == "live" else None
    if watch is not None:
        watchers.append(watch)
    loggers = [
        JsonLinesLogger(directory=parts.run.directory),
        build(parts.config, "logger", job=logged_job(parts)),
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
    last = whole_checkpoint(parts, NEWEST_FIRST)
    if last is not None:
        console.print(f"train: going on from step {checkpoint_step(last)} of {trainer.max_steps} ({last})")
    for logger in loggers:
        logger.log_hyperparams(parts.info.config)
    used = used_samples(data.train_counts)
    told = [f"{count} {reason}" for reason, count in {**used["dropped"], **used["events"]}.items()]
    console.print(
        f"train: {used['num_out']} samples in {data.train_counts.num_rows} rows; {', '.join(told) or 'none dropped'}"
    )
    forget_peak()
    failed = True
    try:
        trainer.fit(drafter, datamodule=data, ckpt_path=last, weights_only=True)
        failed = False
    finally:
        data.close()
        parts.end_capture()
        if parts.place.group_folder is not None:  # what follows is another process's
            finish_wandb(failed=failed)
    metrics = [
        metric("num_parameters", sum(p.numel() for p in drafter.parameters()), origin="measured"),
        metric("num_train_steps", trainer.global_step, origin="measured"),
        metric("num_train_tokens", accounting.tokens, origin="measured"),
        metric("train_time_s", training_time_s(parts.run.directory), origin="measured"),
        metric("train_peak_memory_bytes", peak_bytes(), origin="measured"),
        metric("train_flops", accounting.flops(accounting.totals), origin="measured"),
        metric("draft_vocabulary_coverage", parts.coverage, origin="measured"),
        *(
            metric(f"train_{name}", rate, origin="measured")
            for name, rate in accounting.rates(accounting.totals).items()
        ),
    ]
    skipped = sum(watcher.num_skipped for watcher in watchers if isinstance(watcher, SpikeGuard))
    if skipped:
        used["events"]["steps skipped by the spike guard"] = skipped
    if watch is not None:
        used["events"] |= watch.events
    return {**used, "num_in": len(parts.conversations.tokenized["train"])}, metrics


def used_samples(counts: PackingCounts) -> dict[str, Any]:
    """What ``StageRecord`` says of the samples that are trained on, and of those that are not."""
    dropped = {
        "too few supervised tokens": counts.skipped_without_supervised_tokens,
        "enough supervised tokens only beyond row_tokens": counts.skipped_by_truncation,
        "same content as another conversation": counts.duplicates,
    }
    return {
        "num_out": counts.num_samples,
        "dropped": {reason: count for reason, count in dropped.items() if count},
        "events": {"truncated to row_tokens": counts.truncated} if counts.truncated else {},
    }


def training_time_s(run_dir: Path) -> float:
    """Wall clock of training, the parts before a resume included."""
    return max((line["time_s"] for line in read_metrics(run_dir)), default=0.0)


def trained(parts: Parts) -> tuple[Drafter, str]:
    """The drafter with the weights of the checkpoint to evaluate, and which one that is."""
    path = whole_checkpoint(parts, [f"{parts.evaluation.checkpoint}.ckpt", *NEWEST_FIRST])
    if path is not None:
        parts.drafter.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["state_dict"])
        name = f"{path.stem}, step {checkpoint_step(path)}"
    elif parts.imported is not None:
        name = f"imported from {parts.imported.source}"
    else:
        raise ValueError(
            f"{parts.run.checkpoints} holds no checkpoint: add train to stages, or name one with drafter.from_pretrained"
        )
    return parts.drafter.to(resolve_device("auto")).eval(), name


def whole_checkpoint(parts: Parts, names: Sequence[str]) -> Path | None:
    found, damaged = first_whole(parts.run.checkpoints, names)
    for path in damaged:
        console.print(f"{path} is damaged (torn by a kill, or a fault of the disk) and is passed over")
    if damaged and found is None:
        raise ValueError(f"{parts.run.checkpoints}: no checkpoint is whole; start anew with run.fresh=true")
    return found
