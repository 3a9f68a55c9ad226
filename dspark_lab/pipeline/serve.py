"""Stage *serve*, the serve gate: the export in vLLM, compared with decoding here, prompt by prompt."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hydra.utils import get_class
from omegaconf import OmegaConf

from dspark_lab.checkpoint.description import format_of
from dspark_lab.checkpoint.engines import unservable_adaptively, unservable_on_cpu, unservable_options
from dspark_lab.checkpoint.export import RUN_CARD
from dspark_lab.checkpoint.reading import Checkpoint, read_checkpoint
from dspark_lab.checkpoint.warm_start import load_weights
from dspark_lab.drafter.base import Drafter
from dspark_lab.evaluation.acceptance import acceptance_metrics
from dspark_lab.evaluation.decode import evaluate_decode
from dspark_lab.evaluation.gate import Agreement, compare, mismatches
from dspark_lab.evaluation.traces import read_traces
from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.engine import Engine, Measured, measure_frontier
from dspark_lab.pipeline.parts import Parts
from dspark_lab.progress import console, track
from dspark_lab.records import Metric, TokenizedConversation, Trace
from dspark_lab.report.served import INTERPRETED, SERVED_FILE
from dspark_lab.report.vocabulary import metric
from dspark_lab.target.precision import resolve_device


def refuse_unservable(parts: Parts) -> None:
    """ValueError for what vLLM is known not to serve, before anything is trained."""
    node = parts.config.drafter
    options: Any = OmegaConf.to_container(node, resolve=True)
    algorithm = format_of(get_class(node._target_)).name
    said = unservable_options(
        algorithm,
        options,
        parts.target.spec.rope_parameters,
        reduced=parts.config.data.draft_vocab_size is not None,
    )
    on_cpu = resolve_device("auto").type == "cpu"
    if on_cpu and parts.serving.endpoint is None:
        said += unservable_on_cpu(options)
    most = options.get("num_draft_tokens") or options["block_size"] - (not options["sample_from_anchor"])
    if (asked := parts.serving.judged or 0) > most:
        said.append(
            f"serve.num_draft_tokens={asked}: this {algorithm} drafts at most {most}; ask for fewer, or train with "
            + ("a larger drafter.num_draft_tokens" if "num_draft_tokens" in options else "larger blocks")
        )
    if "adaptive" in parts.serving.others:
        said += unservable_adaptively(algorithm, on_cpu=on_cpu)
    if said:
        raise ValueError(f"{'; '.join(said)}. Or leave serve out of stages, or try it with export.force=true")


def serve(parts: Parts) -> Outcome:
    """Answer the benchmark's prompts with vLLM and the export, and compare with what is accepted here.

    Then every other combination of ``serve.num_draft_tokens`` and ``serve.concurrency`` is measured in the engine.
    """
    folder = parts.run.directory.resolve() / "export"
    if not (folder / RUN_CARD).is_file():
        raise ValueError(f"{folder} holds no export: add export to stages")
    format_of(get_class(parts.config.drafter._target_))  # importing a class makes its format known
    checkpoint, recipe = read_checkpoint(str(folder)), parts.serving
    num_draft_tokens = recipe.judged or checkpoint.description.num_draft_tokens
    prompts = parts.conversations.evaluation_prompts[: recipe.num_prompts]
    if "decode" in parts.evaluation.modes:
        own = decoded_here(parts, checkpoint, prompts, num_draft_tokens)
    else:
        own = replayed_here(parts, prompts)
    prompts, ours = own.prompts, own.traces

    engine = Engine(parts, checkpoint, prompts)
    for fault in engine.faults:
        console.print(f"[yellow]serve: {fault}[/yellow]")
    measured, failures = measure_frontier(engine, (num_draft_tokens, *recipe.others))
    served, setting = measured[0].served, measured[0].setting
    theirs = [answer.trace(prompt) for answer, prompt in zip(served.answers, prompts, strict=True)]
    agreement = compare(ours, theirs, seed=parts.evaluation.seed, faults=engine.faults)
    different = None
    if recipe.sampling.greedy:
        different = mismatches(own.texts, [answer.token_ids for answer in served.answers])
    tell(agreement, different, num_prompts=len(prompts))

    record = {"agreement": asdict(agreement), "agrees": agreement.agrees, "setting": setting, "mismatches": different}
    record |= {
        "ours_by": own.way,
        "counters": served.counters and asdict(served.counters),
        "frontier": [asdict(found.point) for found in measured],
        "failures": failures,
    }
    record |= {name: [asdict(trace) for trace in traces] for name, traces in {"ours": ours, "served": theirs}.items()}
    (parts.run.directory / SERVED_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    events = {"verdict: agree" if agreement.agrees else "verdict: disagree": 1}
    if different:
        events["prompts with another text than here"] = len(different)
    metrics = gate_metrics(agreement, theirs, setting, seed=parts.evaluation.seed)
    for found in measured:
        metrics += speed_metrics(found)
    if different is not None:
        rate = len(different) / len(prompts)
        metrics.append(
            metric("served_mismatch_rate", rate, origin="measured", setting=setting, num_samples=len(prompts))
        )
    accounting = {"num_in": len(prompts), "num_out": len(prompts), "unit": "prompts", "events": events}
    return {**accounting, "error": "; ".join(failures) or None}, metrics


@dataclass(frozen=True, slots=True)
class Own:
    """Our side of the comparison. ``texts``: the target's own answer to each prompt, without a drafter."""

    way: str  # decode | replay
    prompts: Sequence[TokenizedConversation]
    traces: Sequence[Trace]
    texts: Sequence[Sequence[int]]


def decoded_here(
    parts: Parts, checkpoint: Checkpoint, prompts: Sequence[TokenizedConversation], num_draft_tokens: int
) -> Own:
    """By our loop, drafted and verified as in the engine."""
    decoded = evaluate_decode(
        parts.target,
        exported(parts, checkpoint),
        prompts,
        sampling=parts.serving.sampling,
        num_draft_tokens=num_draft_tokens,
        seed=parts.evaluation.seed,
        draft_greedily=parts.serving.draft_greedily,
        verification=parts.serving.verification,
        progress=track,
    )
    return Own("decode", prompts, decoded.traces, decoded.plain_token_ids)


def replayed_here(parts: Parts, prompts: Sequence[TokenizedConversation]) -> Own:
    """What stage evaluate has replayed, for a target that no process here holds; prompts that it refused are left out.

    Its weights were not rounded for export.
    """
    split = parts.conversations.gate_split
    path = parts.run.traces if split == "evaluation" else parts.run.gate_traces
    traces = {trace.prompt_id: trace for trace in read_traces(path, origin="replayed")}
    answers = {conversation.id: conversation.answer_token_ids for conversation in parts.conversations.answered[split]}
    kept = [prompt for prompt in prompts if prompt.id in traces]
    return Own("replay", kept, [traces[prompt.id] for prompt in kept], [answers[prompt.id] or () for prompt in kept])


def exported(parts: Parts, checkpoint: Checkpoint) -> Drafter:
    drafter: Drafter = parts.drafter
    load_weights(drafter, checkpoint)
    return drafter.to(resolve_device("auto")).eval()


def tell(agreement: Agreement, different: Sequence[int] | None, *, num_prompts: int) -> None:
    word = "[green]agree[/green]" if agreement.agrees else "[red]disagree[/red]"
    console.print(f"serve: {word}: {agreement}")
    if agreement.causes:
        told, *causes = agreement.causes
        console.print(f"serve: {told}. Likely causes:" if causes else f"serve: {told}.")
    for cause in agreement.causes[1:]:
        console.print(f"  - {cause}")
    if different is not None:
        console.print(
            f"serve: {num_prompts - len(different)} of {num_prompts} greedy answers are the target's own, token for token"
        )


def gate_metrics(agreement: Agreement, served: Sequence[Trace], setting: dict[str, Any], *, seed: int) -> list[Metric]:
    """Acceptance in the engine, ours beside it, and their difference."""
    kept = ("acceptance_length", "acceptance_rate_", "num_verify_steps")
    common: dict[str, Any] = {"origin": "measured", "setting": setting, "num_samples": len(served)}
    found = [
        metric(f"served_{entry.name}", entry.value, low=entry.low, high=entry.high, **common)
        for entry in acceptance_metrics(served, setting=setting, origin="measured", seed=seed)
        if entry.name.startswith(kept)
    ]
    return [
        *found,
        metric("exported_acceptance_length", agreement.ours, **common),
        metric("served_acceptance_difference", agreement.difference, low=agreement.low, high=agreement.high, **common),
        metric("served_agreement", float(agreement.agrees), **common),
    ]


def speed_metrics(measured: Measured) -> list[Metric]:
    """Null with the reason where kernels were interpreted."""
    point = measured.point
    values = {
        "served_tokens_per_s": point.tokens_per_s,
        "served_tokens_per_s_per_user": point.tokens_per_s_per_user,
        "served_time_to_first_token_s": point.time_to_first_token_s,
    }
    setting = {**measured.setting, **({"undefined": INTERPRETED} if measured.interpreted else {})}
    return [
        metric(name, value, origin="measured", setting=setting, num_samples=len(measured.served.answers))
        for name, value in values.items()
    ]
