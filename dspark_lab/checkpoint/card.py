"""The two cards of an exported drafter: ``README.md`` for people, ``run_card.json`` for programs. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dspark_lab.checkpoint.description import Description
from dspark_lab.records import TargetSpec

NOT_RECORDED = "not recorded"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where an exported drafter comes from. ``sources`` are the records of what it was trained on, none if imported.

    ``checkpoint`` names the weights ("best, step 400"), ``imported_from`` the checkpoint they started from,
    ``acceptance`` is Markdown.
    """

    run: str
    checkpoint: str
    command: str
    config: Mapping[str, Any]
    target: TargetSpec
    target_licence: str | None
    imported_from: str | None
    sources: Sequence[Mapping[str, Any]]
    acceptance: str


def target_licence(configured: str | None, folder: Path) -> str | None:
    """What the config says, else what the target's own model card does."""
    card = folder / "README.md"
    if configured is not None or not card.is_file():
        return configured
    from huggingface_hub import ModelCard

    return ModelCard(card.read_text(encoding="utf-8")).data.get("license")


def model_card(
    description: Description,
    provenance: Provenance,
    *,
    verifier: str,
    serve_command: str,
    faults: Sequence[str],
    under_load: str,
    warnings: Sequence[str],
) -> str:
    """Markdown with the front matter that the Hugging Face hub reads. ``under_load`` is Markdown.

    ``faults`` are the engine's, with the settings of ``serve_command``.
    """
    licence = provenance.target_licence
    held = "Speculators format" if description.latent is None else "vLLM's k3_dspark format"
    front = {
        **({"license": licence} if licence else {}),
        **({} if Path(verifier).is_absolute() else {"base_model": verifier}),
        "library_name": "speculators" if description.latent is None else "vllm",
        "tags": ["speculative-decoding", description.algorithm],
    }
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {description.algorithm} drafter for {provenance.target.name}",
        f"Drafts up to {description.num_draft_tokens} tokens for the target to verify. {held}; written by "
        f"dspark_lab from the run `{provenance.run}` ({provenance.checkpoint}).",
        "## Serve\n\n```bash\n" + serve_command + "\n```",
        *[f"{fault}." for fault in faults],
        _warnings(warnings),
        "## Under load\n\n" + under_load,
        "## Target\n\n" + _target(provenance, verifier),
        "## Training\n\n" + _training(provenance, description.algorithm),
        "## Acceptance\n\n" + provenance.acceptance.strip(),
        "## Configuration\n\n```bash\n" + provenance.command + "\n```\n\n<details><summary>resolved</summary>\n\n```yaml\n"
        + yaml.safe_dump(dict(provenance.config), sort_keys=False) + "```\n\n</details>",
    ]  # fmt: skip
    return "\n\n".join(section for section in sections if section) + "\n"


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    return "**An engine cannot serve this drafter as it was trained:**\n\n" + "\n".join(
        f"* {line}" for line in warnings
    )


def _target(provenance: Provenance, verifier: str) -> str:
    target, licence = provenance.target, provenance.target_licence
    told = (
        f"{licence}; it binds users of this drafter too" if licence else f"{NOT_RECORDED}: see the target's model card"
    )
    return "\n".join(
        [
            f"* model: `{verifier}`, revision {target.revision}, weights {target.fingerprint}",
            f"* captured states enter layers {list(target.layer_ids)} of {target.num_layers}",
            f"* licence: {told}",
        ]
    )


def _training(provenance: Provenance, algorithm: str) -> str:
    lines = [f"Weights imported from `{provenance.imported_from}`."] if provenance.imported_from else []
    config = provenance.config
    recipe = {
        "loss": {**config["loss"], **config["loss"].get(algorithm, {})},
        **{name: config[name] for name in ("optimizer", "lr_schedule", "trainer")},
    }
    for name, node in recipe.items():
        told = [f"{key}={value}" for key, value in node.items() if key == "terms" or not isinstance(value, Mapping)]
        lines.append(f"* {name}: " + ", ".join(entry for entry in told if not entry.startswith("_target_")))
    if not provenance.sources:
        return "\n".join([*lines, f"* data: {NOT_RECORDED} by this run"])
    rows = [
        f"| {source['name']} | {source.get('num_samples', '')} | {source.get('num_tokens', '')} | "
        f"{source.get('revision') or NOT_RECORDED} | {source.get('licence') or NOT_RECORDED} |"
        for source in provenance.sources
    ]
    table = ["| data source | samples | tokens | revision | licence |", "| --- | ---: | ---: | --- | --- |", *rows]
    return "\n".join([*lines, "", *table])
