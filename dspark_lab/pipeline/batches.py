"""Mode *batch* of stage *evaluate*: what ``scheduler`` makes of real decoding, several requests at a time."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dspark_lab.drafter.base import Drafter
from dspark_lab.evaluation.batch import PLAIN, BatchResult, Way, evaluate_batches
from dspark_lab.pipeline.build import asks_for_step_times, build
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.simulate import acceptance_of, deployed, maker, scheduler_name
from dspark_lab.progress import console, track
from dspark_lab.records import Metric
from dspark_lab.report.vocabulary import metric


def decode_batches(parts: Parts, drafter: Drafter, setting: Mapping[str, Any]) -> list[Metric]:
    """Plain decoding and decoding under the run's scheduler, in turn, at every ``evaluate.batch_sizes``."""
    recipe = parts.evaluation
    device = drafter.target_head.lm_head.device
    prompts = [
        replace(prompt, token_ids=prompt.token_ids.to(device)) for prompt in parts.conversations.evaluation_prompts
    ]
    scheduler, profile = maker(parts), step_times(parts)
    ways = [PLAIN, Way(scheduler_name(parts), drafter, lambda: scheduler(profile))]
    metrics: list[Metric] = []
    for batch_size in recipe.batch_sizes:
        plain, ours = evaluate_batches(
            parts.in_process.batch_verifier,
            ways,
            prompts[: recipe.num_batch_prompts],
            batch_size=batch_size,
            sampling=recipe.sampling,
            num_draft_tokens=int(setting["num_draft_tokens"]),
            eos_token_ids=parts.target.spec.eos_token_ids,
            seed=recipe.seed,
            verification=recipe.verification,
            num_rounds=recipe.num_batch_rounds,
            progress=track,
        ).values()
        here = {**setting, "scheduler": ways[1].name, "batch_size": batch_size}
        metrics += batch_metrics(plain, ours, here, greedy=recipe.sampling.greedy)
        console.print(
            f"evaluate: {batch_size} together: {np.median(ours.rates):.1f} tokens/s by {ways[1].name}, "
            f"{np.median(plain.rates):.1f} plain ({ours.num_verified:.2f} drafts verified a step, "
            f"{ours.acceptance_length:.2f} tokens)"
        )
    return metrics


def step_times(parts: Parts) -> Any:
    """The hardware's, where the scheduler asks for them: for the run's own traces, as ``stages=simulate`` has them."""
    if not asks_for_step_times(parts.config):
        return None
    _, drafter, _ = acceptance_of(parts)
    return deployed(
        parts.config, build(parts.config, "hardware"), drafter, build(parts.config, "simulate"), None
    ).profile


def batch_metrics(plain: BatchResult, ours: BatchResult, setting: Mapping[str, Any], *, greedy: bool) -> list[Metric]:
    found = {
        "batch_tokens_per_s": float(np.median(ours.rates)),
        "batch_plain_tokens_per_s": float(np.median(plain.rates)),
        "batch_speedup": float(np.median(ours.rates / plain.rates)),
        "batch_acceptance_length": ours.acceptance_length,
        "batch_verified_tokens_per_step": ours.num_verified,
    }
    if greedy:
        unlike = [a != b for a, b in zip(ours.token_ids, plain.token_ids, strict=True)]
        found["batch_greedy_mismatch_rate"] = float(np.mean(unlike))
    number = len(ours.token_ids)
    return [
        metric(name, value, origin="measured", setting=setting, num_samples=number) for name, value in found.items()
    ]
