"""Stage *evaluate*: acceptance by replay and by real decoding, one prompt at a time or in batches."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dspark_lab.drafter.base import Drafter
from dspark_lab.evaluation.acceptance import acceptance_metrics
from dspark_lab.evaluation.decode import Timing, evaluate_decode, save_timing
from dspark_lab.evaluation.examples import Example, choose, explain, save_examples
from dspark_lab.evaluation.replay import ReplayResult, evaluate_replay
from dspark_lab.evaluation.traces import save_traces
from dspark_lab.pipeline.batches import decode_batches
from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.published import beside_published
from dspark_lab.pipeline.train import trained
from dspark_lab.progress import track
from dspark_lab.records import Metric, Trace
from dspark_lab.report.vocabulary import metric


def evaluate(parts: Parts) -> Outcome:
    """The trained drafter on the benchmark's prompts, in every mode that is asked for."""
    drafter, checkpoint = trained(parts)
    recipe = parts.evaluation
    num_draft_tokens = recipe.num_draft_tokens or drafter.num_draft_tokens
    setting = {
        "benchmark": parts.benchmark.name,
        **asdict(recipe.sampling),
        "num_draft_tokens": num_draft_tokens,
        "verification": recipe.verification,
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
            parts.conversations.tokenized["evaluation"][: recipe.num_replay_prompts],
            sampling=recipe.sampling,
            num_draft_tokens=num_draft_tokens,
            target_head=drafter.target_head,
            eos_token_ids=parts.target.spec.eos_token_ids,
            seed=recipe.seed,
            verification=recipe.verification,
            progress=track,
        )
        traces["replayed"], dropped = replayed.traces, replayed.refused
        metrics += acceptance_metrics(replayed.traces, setting=setting, origin="replayed", seed=recipe.seed)
    if "decode" in recipe.modes:
        decoded = evaluate_decode(
            parts.target,
            drafter,
            parts.conversations.evaluation_prompts[: recipe.num_decode_prompts],
            sampling=recipe.sampling,
            num_draft_tokens=num_draft_tokens,
            seed=recipe.seed,
            verification=recipe.verification,
            progress=track,
        )
        traces["measured"] = decoded.traces
        save_timing(parts.run.directory, decoded.timing)
        here = {**setting, "engine": "huggingface"}  # decoding is this process's, whoever captured
        metrics += loop_metrics(decoded.mismatch_rate, decoded.timing, here, num_prompts=len(decoded.traces))
        metrics += acceptance_metrics(decoded.traces, setting=here, origin="measured", seed=recipe.seed)
        if parts.published is not None:
            metrics += beside_published(parts, decoded.traces, here)
    if traces:
        save_traces(parts.run.traces, traces)
        save_examples(parts.run.directory, examples_of(parts, traces))
    if "batch" in recipe.modes:
        metrics += decode_batches(parts, drafter, {**setting, "engine": "huggingface"})
    if "served" in parts.conversations.assigned:
        save_traces(parts.run.gate_traces, {"replayed": replay_as_served(parts, drafter).traces})
    in_batches = parts.conversations.evaluation_prompts[: recipe.num_batch_prompts]
    counted = len(traces.get("replayed", traces.get("measured", in_batches)))
    record = {"num_in": counted + sum(dropped.values()), "num_out": counted, "dropped": dropped}
    return {**record, "unit": "prompts"}, metrics


def replay_as_served(parts: Parts, drafter: Drafter) -> ReplayResult:
    """Our side of a serve gate whose sampling, drafting or verification is not the evaluation's."""
    serving = parts.serving
    return evaluate_replay(
        drafter,
        parts.store.get,
        parts.conversations.tokenized["served"],
        sampling=serving.sampling,
        num_draft_tokens=serving.judged or drafter.num_draft_tokens,
        target_head=drafter.target_head,
        eos_token_ids=parts.target.spec.eos_token_ids,
        seed=parts.evaluation.seed,
        draft_greedily=serving.draft_greedily,
        verification=serving.verification,
        progress=track,
    )


def examples_of(parts: Parts, traces: Mapping[str, Sequence[Trace]]) -> list[Example]:
    """Of real decoding where there is some, else of replay."""
    origin = "measured" if "measured" in traces else "replayed"
    texts = {prompt.id: prompt.token_ids.tolist() for prompt in parts.conversations.evaluation_prompts}
    decode = parts.target.tokenizer.decode
    return [
        explain(
            trace, prompt=str(decode(texts[trace.prompt_id])), origin=origin, piece=lambda token: str(decode([token]))
        )
        for trace in choose(traces[origin], parts.evaluation.num_examples)
    ]


def loop_metrics(
    mismatch_rate: float | None, timing: Timing | None, setting: Mapping[str, Any], *, num_prompts: int
) -> list[Metric]:
    """Speed and text equality of real decoding."""
    found = []
    if mismatch_rate is not None:
        found.append(metric("greedy_mismatch_rate", mismatch_rate, origin="measured", setting=setting,
                            num_samples=num_prompts))  # fmt: skip
    if timing is not None:
        found += [
            metric(name, value, origin="measured", setting=setting, num_samples=len(timing.prompts))
            for name, value in timing.speeds.items()
        ]
    return found
