"""Stage *calibrate*: temperatures for the drafter's confidences, from the traces of the last evaluation."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dspark_lab.evaluation.calibration import (
    Position,
    fit_temperatures,
    gather_rounds,
    judge,
    save_calibration,
    split_rounds,
)
from dspark_lab.evaluation.traces import read_traces
from dspark_lab.pipeline.build import confidence_source
from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.parts import Parts
from dspark_lab.progress import console
from dspark_lab.records import Metric
from dspark_lab.report.results import read_results
from dspark_lab.report.vocabulary import metric


def calibrate(parts: Parts) -> Outcome:
    """Fit on some prompts, judge on the others; both go to ``calibration.json`` beside the checkpoints."""
    recipe = parts.calibration
    traces = read_traces(parts.run.traces, origin=recipe.origin)
    source = confidence_source(parts.config)
    setting = {
        **evaluated_setting(parts), "num_bins": recipe.num_bins, "fit_share": recipe.fit_share, "confidence": source,
    }  # fmt: skip
    if recipe.origin == "replayed" and setting["temperature"] > 0:
        raise ValueError(
            f"calibrate.origin=replayed with traces of temperature {setting['temperature']}: after a step's first rejected "
            "slot their confidences are those of the recorded tokens, not of the drafts that a scheduler sees; evaluate "
            "with evaluate.mode=decode and set calibrate.origin=measured"
        )
    rounds = gather_rounds(traces, source)
    fitted, held_out = split_rounds(rounds, fit_share=recipe.fit_share, min_rounds=recipe.min_rounds, seed=recipe.seed)
    temperatures = fit_temperatures(fitted, grid=recipe.grid, num_bins=recipe.num_bins)
    positions = judge(
        held_out,
        temperatures,
        num_fit_rounds=(~np.isnan(fitted.confidence)).sum(0).tolist(),
        num_bins=recipe.num_bins,
        seed=recipe.seed,
    )
    save_calibration(parts.run.calibration, positions, setting=setting | {"origin": recipe.origin})
    for position in positions:
        before, after = position.before, position.after
        console.print(
            f"calibrate: position {position.k}: temperature {position.temperature:.2f}, calibration error "
            f"{100 * before.ece:.1f} % -> {100 * after.ece:.1f} % ({100 * after.ece_low:.1f} to "
            f"{100 * after.ece_high:.1f}; {100 * after.ece_floor:.1f} if exact), {position.num_rounds} rounds"
        )
    num_steps = sum(len(trace.steps) for trace in traces)
    dropped = {"cut by the answer's end": num_steps - len(rounds.accepted)}
    counted = {"num_in": num_steps, "num_out": len(rounds.accepted), "dropped": dropped, "unit": "verify steps"}
    return counted, calibration_metrics(positions, setting, origin=recipe.origin, num_prompts=len(set(held_out.prompt)))


def evaluated_setting(parts: Parts) -> Mapping[str, Any]:
    """What the newest evaluation, whose traces are on disk, was measured with."""
    found = [
        entry.setting
        for entry in read_results(parts.run.directory).metrics
        if (entry.name, entry.origin) == ("acceptance_length", parts.calibration.origin)
    ]
    if not found:
        raise ValueError(f"{parts.run.directory} holds traces but no result of evaluate: add evaluate to stages")
    return found[-1]


def calibration_metrics(
    positions: Sequence[Position], setting: Mapping[str, Any], *, origin: str, num_prompts: int
) -> list[Metric]:
    """Intervals and counts are over the held-out prompts."""
    common: dict[str, Any] = {"origin": origin, "setting": setting, "num_samples": num_prompts}
    found = []
    for position in positions:
        k = position.k
        for name, quality in (("confidence", position.before), ("calibrated", position.after)):
            ece, brier = (quality.ece_low, quality.ece_high), (quality.brier_low, quality.brier_high)
            found += [
                metric(f"{name}_ece_{k}", quality.ece, low=ece[0], high=ece[1], **common),
                metric(f"{name}_brier_{k}", quality.brier, low=brier[0], high=brier[1], **common),
                metric(f"{name}_auroc_{k}", quality.auroc, **common),
            ]
        found.append(metric(f"confidence_ece_floor_{k}", position.after.ece_floor, **common))
        found.append(metric(f"confidence_temperature_{k}", position.temperature, **common))
    return found
