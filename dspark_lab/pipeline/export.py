"""Stage *export*: weights, config and both cards of the trained drafter."""

from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from dspark_lab.checkpoint import k3_dspark
from dspark_lab.checkpoint.card import Provenance, model_card, target_licence
from dspark_lab.checkpoint.description import Description, describe, format_of
from dspark_lab.checkpoint.engines import (
    VLLM_VERSION,
    card_verification,
    serve_command,
    unservable,
    untold,
    verification_faults,
)
from dspark_lab.checkpoint.export import write_folder
from dspark_lab.checkpoint.speculators import config_of, tensors_of
from dspark_lab.drafter.attention_kinds import NO_LATENTS, is_latent
from dspark_lab.drafter.base import Drafter
from dspark_lab.pipeline.distributed import Outcome
from dspark_lab.pipeline.engine_schedule import EngineSchedule, engine_schedule
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.train import trained
from dspark_lab.progress import console
from dspark_lab.records import Metric, content_hash
from dspark_lab.report.collect import Collection, RunResult
from dspark_lab.report.provenance import git_commit
from dspark_lab.report.results import RESULTS_FILE, Results, read_results
from dspark_lab.report.text import markdown


def refuse_unwritable(config: DictConfig) -> None:
    """ValueError for a drafter that no format holds, before anything is trained."""
    drafter_class = get_class(config.drafter._target_)
    algorithm = format_of(drafter_class).name
    options: Any = OmegaConf.to_container(config.drafter, resolve=True)
    if not is_latent(options["attention"]):
        return
    if not drafter_class.takes_latents:
        raise ValueError(f"drafter={algorithm}: {NO_LATENTS}")
    said = k3_dspark.unwritable(algorithm, options, reduced=config.data.draft_vocab_size is not None)
    if said:
        raise ValueError("; ".join(said))


def export(parts: Parts) -> Outcome:
    """Write ``<run>/export``, a folder that inference engines load, and say what an engine will not serve of it."""
    drafter, checkpoint = trained(parts)
    description, recipe, spec = describe(drafter), parts.export, parts.target.spec
    target_folder = parts.target.resolved.folder
    # Loaders take missing tensors from here, so it must be where they really are.
    verifier = spec.model if spec.fingerprint.startswith("hub-") else str(target_folder)
    folder = parts.run.directory.resolve() / "export"
    path = parts.run.directory / RESULTS_FILE
    results = _at_checkpoint(read_results(parts.run.directory) if path.is_file() else Results(parts.info), checkpoint)
    provenance = Provenance(
        run=parts.run.name,
        checkpoint=checkpoint,
        command=parts.info.command,
        config=parts.info.config,
        target=spec,
        target_licence=target_licence(parts.config.target.get("licence"), target_folder),
        imported_from=parts.imported.source if parts.imported else None,
        sources=next((stage.sources for stage in results.stages if stage.name == "capture"), []),
        acceptance=markdown(Collection((RunResult(parts.run.directory, results),), {})),
    )
    warnings = unservable(drafter)
    config, tensors = _content(parts, drafter, description, verifier)
    command = partial(serve_command, description, target=verifier, folder=str(folder), arguments=recipe.serve_arguments)
    schedule = engine_schedule(parts)
    under_load = _under_load(description, schedule, command)
    num_bytes = write_folder(
        folder,
        config=config,
        tensors=tensors,
        model_card=model_card(
            description,
            provenance,
            verifier=verifier,
            serve_command=command(),
            faults=verification_faults(card_verification(description.algorithm)),
            under_load=under_load,
            warnings=warnings,
        ),
        run_card=_run_card(parts, provenance, results.metrics, warnings)
        | {"engine_schedule": schedule if isinstance(schedule, str) else asdict(schedule)},
    )
    console.print(f"export: {folder} ({num_bytes / 2**20:.1f} MiB, {recipe.dtype})", soft_wrap=True)
    for warning in warnings:
        console.print(f"[yellow]export: an engine cannot serve this: {warning}[/yellow]")
    return {}, []


def _content(
    parts: Parts, drafter: Drafter, description: Description, verifier: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors in the format that holds its kind of attention."""
    recipe = parts.export
    tensors = tensors_of(drafter, dtype=recipe.torch_dtype, include_target_tensors=recipe.include_target_tensors)
    if description.latent is not None:
        return k3_dspark.config_of(description, dtype=recipe.dtype), k3_dspark.to_theirs(tensors)
    architecture = parts.target.spec.architecture
    return config_of(description, verifier=verifier, architecture=architecture, dtype=recipe.dtype), tensors


def _under_load(description: Description, schedule: EngineSchedule | str, command: Callable[..., str]) -> str:
    """What vLLM can be told of how many tokens to verify, and what it cannot."""
    lines = []
    if isinstance(schedule, str):
        lines.append(f"No lengths by load: {schedule}.")
    else:
        line = command(lengths=schedule.ranges)
        lines.append(
            f"Draft tokens by the number of requests in a step, predicted ({schedule.basis}):\n\n```bash\n{line}\n```"
        )
    if description.algorithm == "dspark":
        lines.append(
            'On GPUs, `"enable_adaptive_verification": true` in their place lets vLLM trim each step by the confidences.'
        )
    told = "\n".join(f"* {line}" for line in untold(description.algorithm))
    return "\n\n".join([*lines, f"vLLM {VLLM_VERSION} cannot be told:\n\n{told}"])


def _at_checkpoint(results: Results, checkpoint: str) -> Results:
    """Without what was measured with other weights."""
    kept = [metric for metric in results.metrics if metric.setting.get("checkpoint", checkpoint) == checkpoint]
    return replace(results, metrics=tuple(kept))


def _run_card(parts: Parts, provenance: Provenance, metrics: tuple[Metric, ...], warnings: list[str]) -> dict[str, Any]:
    trained = any(parts.run.checkpoints.glob("*.ckpt"))
    keys = sorted({sample.key for sample in parts.conversations.tokenized["train"]}) if trained else []
    spec, vocabulary = provenance.target, parts.vocabulary
    return {
        "run": provenance.run,
        "checkpoint": provenance.checkpoint,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": provenance.command,
        "git_commit": git_commit(),
        "versions": dict(parts.info.versions),
        "machine": asdict(parts.info.machine),
        "seed": parts.info.seed,
        "config_hash": parts.info.config_hash,
        "target": {
            "name": spec.name,
            "model": spec.model,
            "revision": spec.revision,
            "fingerprint": spec.fingerprint,
            "template_hash": spec.template_hash,
            "licence": provenance.target_licence,
        },
        "data": {
            "num_samples": len(keys),
            "content_hash": content_hash(keys) if trained else None,
            "sources": [dict(source) for source in provenance.sources],
        },
        "draft_vocabulary": {
            "size": vocabulary.size,
            "content_hash": content_hash(vocabulary.draft_to_target.tolist()),
        },
        "imported_from": provenance.imported_from,
        "not_servable": warnings,
        "metrics": [asdict(metric) for metric in metrics],
        "config": provenance.config,
    }
