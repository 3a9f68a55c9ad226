"""Stage *profile*: step times of the run's target, and of its drafter where there is one, on the machine at hand."""

from datetime import UTC, datetime
from typing import Any

import torch
import transformers

from dspark_lab.hardware.measure import Grid, measure_draft, measure_steps
from dspark_lab.hardware.table import Measurement, TableProfile, TimedDraft
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.train import trained, whole_checkpoint
from dspark_lab.progress import console, track
from dspark_lab.report.vocabulary import metric
from dspark_lab.target.verifier import recurrence
from dspark_lab.training.checkpoints import NEWEST_FIRST


def profile(parts: Parts) -> Outcome:
    """Time, fit, and store as ``profile.json``, which ``hardware=measured`` reads."""
    grid: Grid = build(parts.config, "profile")
    target, seed = parts.in_process, int(parts.config.seed)
    kind = recurrence(target.config)
    if kind is not None:
        raise ValueError(
            f"profile: a target of type {target.config.model_type!r} cannot be timed here: its cache cannot be put back "
            f"after each forward (layer kind {kind!r}); take a data sheet's hardware, e.g. hardware=h200"
        )
    steps = tuple(track(measure_steps(target, grid, seed=seed), "profile", total=len(grid)))
    drafts, setting = measured_draft(parts, grid)
    setting |= {
        "device": str(parts.info.machine),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}, in process",
        "date": datetime.now(UTC).date().isoformat(),
    }
    measurement = Measurement(
        name=parts.run.name, target=target.spec.name, num_gpus=1, steps=steps, drafts=drafts, setting=setting
    )
    path = parts.run.directory / "profile.json"
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


def measured_draft(parts: Parts, grid: Grid) -> tuple[tuple[TimedDraft, ...], dict[str, Any]]:
    """The trained drafter's time, and what of it belongs to the setting; nothing where none is trained yet."""
    if whole_checkpoint(parts, NEWEST_FIRST) is None and parts.imported is None:
        console.print("profile: no trained drafter in this run: its time is left out")
        return (), {}
    drafter, checkpoint = trained(parts)
    width = parts.evaluation.num_draft_tokens or drafter.num_draft_tokens
    draft = measure_draft(parts.in_process, drafter, grid, num_draft_tokens=width, seed=int(parts.config.seed))
    return (draft,), {"drafter": parts.info.choices["drafter"], "num_draft_tokens": width, "checkpoint": checkpoint}
