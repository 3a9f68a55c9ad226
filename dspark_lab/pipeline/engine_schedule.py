"""What an engine can be told of our schedulers: the best fixed length of each load, for the export's card."""

from dataclasses import dataclass

import numpy as np

from dspark_lab.hardware.deployment import Hardware
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.simulate import acceptance_of, deployed
from dspark_lab.scheduler.by_load import best_lengths, ranges_of
from dspark_lab.serving.recipe import Simulation


@dataclass(frozen=True, slots=True)
class EngineSchedule:
    """``ranges``: (first, last, draft tokens) of the requests in a step. ``basis``: where the prediction comes from."""

    ranges: tuple[tuple[int, int, int], ...]
    basis: str


def engine_schedule(parts: Parts) -> EngineSchedule | str:
    """From the step times of ``hardware`` and the acceptance of ``traces``; a string says why there is none."""
    recipe: Simulation = build(parts.config, "simulate")
    hardware: Hardware = build(parts.config, "hardware")
    try:
        table, drafter, _ = acceptance_of(parts)
        deployment = deployed(parts.config, hardware, drafter, recipe, None)
    except ValueError as error:
        return str(error)
    rates = np.array([(table.accepted > position).mean() for position in range(table.width)])
    context_tokens = recipe.workload.prompt_tokens + recipe.workload.output_tokens // 2
    lengths = best_lengths(
        rates, deployment.profile, max_requests=recipe.limits.num_requests, context_tokens=context_tokens
    )
    return EngineSchedule(
        tuple(ranges_of(lengths)),
        f"step times of {parts.info.choices['hardware']}, {deployment.told}; acceptance {table.acceptance_length:.2f}, "
        f"{table.origin}, {table.name}; {context_tokens} tokens of context a request",
    )
