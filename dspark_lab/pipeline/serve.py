"""Stage *serve*, the serve gate: the export in vLLM, compared with decoding here, prompt by prompt."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import OmegaConf

from dspark_lab.checkpoint.description import format_of
from dspark_lab.checkpoint.engines import (
    VLLM_VERSION,
    cpu_faults,
    needs_newer_runner,
    speculative_config,
    unservable_options,
)
from dspark_lab.checkpoint.export import RUN_CARD
from dspark_lab.checkpoint.reading import Checkpoint, read_checkpoint
from dspark_lab.checkpoint.warm_start import load_weights
from dspark_lab.cluster.services import Role
from dspark_lab.cluster.vllm import VllmServer
from dspark_lab.drafter.base import Drafter
from dspark_lab.evaluation.acceptance import acceptance_metrics
from dspark_lab.evaluation.decode import DecodeResult, evaluate_decode, prompt_only
from dspark_lab.evaluation.engine import ARGUMENTS, Served, serve_prompts
from dspark_lab.evaluation.gate import Agreement, compare, mismatches
from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.parts import Parts
from dspark_lab.progress import console, track
from dspark_lab.records import Metric, TokenizedConversation, Trace
from dspark_lab.report.vocabulary import metric
from dspark_lab.target.precision import resolve_device

INTERPRETED = "Triton's kernels were interpreted on the CPU"


def refuse_unservable(parts: Parts) -> None:
    """ValueError for a drafter that vLLM is known not to serve, before anything is trained."""
    node = parts.config.drafter
    options: Any = OmegaConf.to_container(node, resolve=True)
    said = unservable_options(
        format_of(get_class(node._target_)).name,
        options,
        parts.target.spec.rope_parameters,
        reduced=parts.config.data.draft_vocab_size is not None,
    )
    if said:
        raise ValueError(f"{'; '.join(said)}. Or leave serve out of stages, or try it with export.force=true")


def serve(parts: Parts) -> Outcome:
    """Answer the benchmark's prompts with vLLM and with our own loop, both with the exported weights, and compare."""
    folder = parts.run.directory.resolve() / "export"
    if not (folder / RUN_CARD).is_file():
        raise ValueError(f"{folder} holds no export: add export to stages")
    format_of(get_class(parts.config.drafter._target_))  # importing a class makes its format known
    checkpoint, recipe = read_checkpoint(str(folder)), parts.serving
    num_draft_tokens = recipe.num_draft_tokens or checkpoint.description.num_draft_tokens
    prompts = [prompt_only(conversation) for conversation in parts.tokenized["evaluation"][: recipe.num_prompts]]
    decoded = decode_here(parts, checkpoint, prompts, num_draft_tokens)
    ours = decoded.traces

    algorithm, options = checkpoint.description.algorithm, checkpoint.description.options
    on_cpu = resolve_device("auto").type == "cpu"
    interpret = on_cpu and needs_newer_runner(algorithm, options)
    for fault in cpu_faults(algorithm, options) if on_cpu else ():
        console.print(f"[yellow]serve: {fault}[/yellow]")
    with start_engine(parts, checkpoint, prompts, num_draft_tokens, on_cpu=on_cpu, interpret=interpret) as server:
        if not server.version.startswith(VLLM_VERSION):
            console.print(f"[yellow]serve: vLLM {server.version}; {VLLM_VERSION} is the one that was tested[/yellow]")
        served = serve_prompts(
            server,
            prompts,
            sampling=parts.evaluation.sampling,
            eos_token_ids=parts.target.spec.eos_token_ids,
            concurrency=recipe.concurrency,
            seed=parts.evaluation.seed,
            progress=lambda items, description: track(items, description, total=len(prompts)),
        )
    theirs = [answer.trace(prompt) for answer, prompt in zip(served.answers, prompts, strict=True)]
    agreement = compare(ours, theirs, seed=parts.evaluation.seed)
    different = None
    if parts.evaluation.sampling.greedy:
        different = mismatches(decoded.plain_token_ids, [answer.token_ids for answer in served.answers])
    setting = {
        **asdict(parts.evaluation.sampling),
        "benchmark": parts.benchmark.name,
        "num_draft_tokens": num_draft_tokens,
        "engine": f"vllm{'-cpu' if on_cpu else ''} {server.version}",
        "dtype": engine_dtype(parts),
        "concurrency": recipe.concurrency,
    }
    tell(agreement, different, num_prompts=len(prompts))
    record = {"agreement": asdict(agreement), "agrees": agreement.agrees, "setting": setting, "mismatches": different}
    record |= {"counters": asdict(served.counters)}
    record |= {name: [asdict(trace) for trace in traces] for name, traces in {"ours": ours, "served": theirs}.items()}
    (parts.run.directory / "serve.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    events = {"verdict: agree" if agreement.agrees else "verdict: disagree": 1}
    if different:
        events["prompts with another text than here"] = len(different)
    metrics = gate_metrics(agreement, theirs, setting, seed=parts.evaluation.seed)
    metrics += speed_metrics(
        served, {**setting, **({"undefined": INTERPRETED} if interpret else {})}, known=not interpret
    )
    if different is not None:
        rate = len(different) / len(prompts)
        metrics.append(
            metric("served_mismatch_rate", rate, origin="measured", setting=setting, num_samples=len(prompts))
        )
    return {"num_in": len(prompts), "num_out": len(prompts), "unit": "prompts", "events": events}, metrics


def decode_here(
    parts: Parts, checkpoint: Checkpoint, prompts: Sequence[TokenizedConversation], num_draft_tokens: int
) -> DecodeResult:
    """Our loop with the exported weights, drafted as in the engine."""
    drafter: Drafter = parts.drafter
    load_weights(drafter, checkpoint)
    return evaluate_decode(
        parts.target,
        drafter.to(resolve_device("auto")).eval(),
        prompts,
        sampling=parts.evaluation.sampling,
        num_draft_tokens=num_draft_tokens,
        seed=parts.evaluation.seed,
        draft_greedily=True,
        progress=track,
    )


def start_engine(
    parts: Parts,
    checkpoint: Checkpoint,
    prompts: Sequence[TokenizedConversation],
    num_draft_tokens: int,
    *,
    on_cpu: bool,
    interpret: bool,
) -> VllmServer:
    """vLLM with the run's target and the drafter in ``checkpoint.source``."""
    recipe, spec, sampling = parts.serving, parts.target.spec, parts.evaluation.sampling
    longest = max(map(len, prompts)) + sampling.max_new_tokens + num_draft_tokens + 1
    speculative = speculative_config(
        checkpoint.description, folder=str(Path(checkpoint.source)), num_draft_tokens=num_draft_tokens
    )
    arguments = [
        "--dtype", engine_dtype(parts),
        "--max-model-len", str(min(longest, spec.max_position_embeddings)),
        "--generation-config", "vllm",  # else the target's own sampling defaults
        "--no-enable-prefix-caching",  # each prompt is prefilled, as here
        "--speculative-config", json.dumps(speculative),
        *ARGUMENTS,
        *recipe.arguments,
    ]  # fmt: skip
    parts.release()
    role = Role(command_prefix=recipe.command_prefix, **({"python": recipe.python} if recipe.python else {}))
    console.print(f"serve: starting vLLM ({parts.run.directory / 'logs' / 'vllm.log'})")
    return VllmServer(
        folder=parts.run.directory / "logs",
        model=str(parts.target.resolved.folder),
        arguments=arguments,
        on_cpu=on_cpu,
        interpret=interpret,
        role=role,
        deadline_s=recipe.deadline_s,
    )


def engine_dtype(parts: Parts) -> str:
    return parts.serving.dtype or str(parts.target.dtype).removeprefix("torch.")


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


def speed_metrics(served: Served, setting: dict[str, Any], *, known: bool) -> list[Metric]:
    first = statistics.median(answer.first_token_s for answer in served.answers)
    values = {"served_tokens_per_s": served.tokens_per_s, "served_time_to_first_token_s": first}
    return [
        metric(name, value if known else None, origin="measured", setting=setting, num_samples=len(served.answers))
        for name, value in values.items()
    ]
