"""Stage *profile*: step times of the run's target and drafter, on the machine at hand or of running vLLM servers."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch
import transformers

from dspark_lab.cluster.vllm import RunningVllm
from dspark_lab.evaluation.engine import DraftCounters
from dspark_lab.hardware.engine import measure_engine_steps, separate_drafts
from dspark_lab.hardware.measure import Grid, measure_drafts, measure_steps
from dspark_lab.hardware.table import Measurement, TableProfile, TimedDraft, TimedStep
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.train import trained, whole_checkpoint
from dspark_lab.progress import console, track
from dspark_lab.report.vocabulary import metric
from dspark_lab.target.verifier import recurrence
from dspark_lab.training.checkpoints import NEWEST_FIRST

PROFILE_FILE = "profile.json"


def profile(parts: Parts) -> Outcome:
    """Time, fit, and store as ``profile.json``, which ``hardware=measured`` reads."""
    grid: Grid = build(parts.config, "profile")
    by_engine = grid.endpoints or parts.info.choices["engine"] == "vllm"
    steps, drafts, setting = engine_times(parts, grid) if by_engine else times_here(parts, grid)
    setting |= {"date": datetime.now(UTC).date().isoformat()}
    measurement = Measurement(
        name=parts.run.name,
        target=parts.target.spec.name,
        num_gpus=grid.num_gpus,
        steps=steps,
        drafts=drafts,
        setting=setting,
    )
    path = parts.run.directory / PROFILE_FILE
    measurement.save(path)
    table = TableProfile.fit(measurement)
    console.print(
        f"profile: {len(steps)} steps timed, {table.num_unsteady} unsteady; fit within {100 * table.mape:.1f} % on average "
        f"({path})"
    )
    single = next((step.time_s for step in steps if step.num_tokens == 1), None)
    metrics = [
        metric("profile_fit_error", table.mape, origin="measured", setting=setting, num_samples=len(steps)),
        metric("profile_step_time_s", single, origin="measured", setting=setting),
    ]
    if drafts:
        metrics.append(metric("profile_draft_time_s", drafts[0].time_s, origin="measured", setting=setting))
    dropped = {"unsteady": table.num_unsteady} if table.num_unsteady else {}
    record = {"num_in": len(steps), "num_out": len(steps) - table.num_unsteady, "dropped": dropped, "unit": "steps"}
    return record, metrics


Times = tuple[tuple[TimedStep, ...], tuple[TimedDraft, ...], dict[str, Any]]
"""Steps, drafts, and the setting they were timed in."""


def times_here(parts: Parts, grid: Grid) -> Times:
    target, seed = parts.in_process, int(parts.config.seed)
    kind = recurrence(target.config)
    if kind is not None:
        raise ValueError(
            f"profile: a target of type {target.config.model_type!r} cannot be timed here: its cache cannot be put back "
            f"after each forward (layer kind {kind!r}); time a server of it (profile.endpoints), or take a data sheet's "
            "hardware, e.g. hardware=h200"
        )
    steps = tuple(track(measure_steps(target, grid, seed=seed), "profile", total=len(grid)))
    drafts, setting = measured_draft(parts, grid)
    return (
        steps,
        drafts,
        setting
        | {
            "device": str(parts.info.machine),
            "threads": torch.get_num_threads(),
            "dtype": str(target.dtype).removeprefix("torch."),
            "engine": f"transformers {transformers.__version__}, torch {torch.__version__}, in process",
        },
    )


def engine_times(parts: Parts, grid: Grid) -> Times:
    """Of every server: those without a drafter give the steps, the others what a draft takes beyond them."""
    plain: list[TimedStep] = []
    drafted: list[TimedStep] = []
    told: dict[str, Any] = {"device": str(parts.info.machine) if not grid.endpoints else "of the endpoints"}
    names = {str(parts.config.target.model), str(parts.target.resolved.folder)}
    for url in grid.endpoints or answering(parts, grid):
        server = RunningVllm(url, targets=names)
        width = num_draft_tokens_of(server)
        timed = measure_engine_steps(
            server,
            grid,
            num_draft_tokens=width,
            vocab_size=parts.target.spec.vocab_size,
            seed=int(parts.config.seed),
        )
        (drafted if width else plain).extend(track(timed, f"profile {url}, {width} draft tokens"))
        told["engine"] = f"vllm {server.version}"
        if width:
            told["num_draft_tokens"] = width
    plain = plain or timed_before(parts)
    drafts, num_lost = separate_drafts(plain, drafted)
    if num_lost:
        console.print(f"profile: {num_lost} numbers of requests whose steps with drafts took no longer: left out")
    return tuple(plain), drafts, told


def timed_before(parts: Parts) -> list[TimedStep]:
    """Steps of a server without a drafter that an earlier command timed: both need not fit on the GPUs at once."""
    path = parts.run.directory / PROFILE_FILE
    earlier = Measurement.load(path) if path.exists() else None
    return list(earlier.steps) if earlier and str(earlier.setting.get("engine")).startswith("vllm") else []


def answering(parts: Parts, grid: Grid) -> Sequence[str]:
    """The server of ``cluster=local`` that answers prompts, started where it does not run."""
    longest = max(grid.num_context_tokens) + grid.warmups + grid.repeats + 2
    longest = min(max(longest, *grid.num_prefill_tokens, 2) + 1, parts.target.spec.max_position_embeddings)
    dtype, folder = str(parts.config.engine.dtype), parts.target.resolved.folder
    return parts.cluster.engine(folder, layer_ids=(), dtype=dtype, max_tokens=longest, payload_folder=None)


def num_draft_tokens_of(server: RunningVllm) -> int:
    try:
        return len(DraftCounters.parse(server.get("/metrics")).accepted_at)
    except ValueError:  # it does no speculative decoding
        return 0


def measured_draft(parts: Parts, grid: Grid) -> tuple[tuple[TimedDraft, ...], dict[str, Any]]:
    """The trained drafter's time, and what of it belongs to the setting; nothing where none is trained yet."""
    if whole_checkpoint(parts, NEWEST_FIRST) is None and parts.imported is None:
        console.print("profile: no trained drafter in this run: its time is left out")
        return (), {}
    drafter, checkpoint = trained(parts)
    width = parts.evaluation.num_draft_tokens or drafter.num_draft_tokens
    timed = measure_drafts(parts.in_process, drafter, grid, num_draft_tokens=width, seed=int(parts.config.seed))
    drafts = tuple(track(timed, "profile the drafter", total=len(grid.num_requests)))
    return drafts, {"drafter": parts.info.choices["drafter"], "num_draft_tokens": width, "checkpoint": checkpoint}
