"""The callbacks group of the config: named nodes, each built with the parts of the run that it needs."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig

from dspark_lab.evaluation.decode import prompt_only
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.parts import Parts
from dspark_lab.training.acceptance import DECODE_ACCEPTANCE

NEEDS: Mapping[str, Callable[[Parts, str], dict[str, Any]]] = {
    "replay": lambda parts, monitor: {
        "conversations": parts.conversations.tokenized["validation"],
        "read_sample": parts.store.get,
        "seed": parts.config.seed,
    },
    "spike_guard": lambda parts, monitor: {},
    "early_stop": lambda parts, monitor: {"monitor": monitor},
    "decode": lambda parts, monitor: {
        "target": parts.target,
        "prompts": [prompt_only(conversation) for conversation in parts.conversations.tokenized["validation"]],
        "seed": parts.config.seed,
    },
    "ema": lambda parts, monitor: {},
}
"""Name -> from the run's parts and the metric that chooses the best checkpoint, what YAML cannot say."""


def monitored(config: DictConfig, *, replayable: bool) -> str:
    """The acceptance that best checkpoint and early stop go by; without a recorded sampling nothing can be replayed."""
    decode = config.callbacks.get("decode")
    if decode is not None and decode.chooses_best:
        return DECODE_ACCEPTANCE
    return "val/acceptance_length" if replayable else "val/acceptance_length_estimate"


def build_callbacks(parts: Parts, *, monitor: str) -> list[Callback]:
    """Those of ``config.callbacks`` that are there and not null.

    Without recorded samplings (``data.regenerate=false``) nothing can be replayed, so ``replay`` is left out.

    Raises:
        ValueError: a name that is not in ``NEEDS``, or a callback that refused a value.
    """
    chosen = [name for name, node in parts.config.callbacks.items() if node is not None]
    unknown = sorted(set(chosen) - NEEDS.keys())
    if unknown:
        raise ValueError(f"callbacks: {', '.join(map(str, unknown))} is none of {', '.join(NEEDS)}")
    if not parts.corpus.regenerate:
        chosen = [name for name in chosen if name != "replay"]
    return [build(parts.config, f"callbacks.{name}", **NEEDS[name](parts, monitor)) for name in chosen]
