"""What a drafter's class says of its checkpoints; ``dspark_lab/checkpoint`` writes and reads them by it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """A drafter in the speculators format and in vLLM.

    ``name`` is its ``speculators_model_type`` and ``architecture`` the class there; ``method`` is what vLLM calls it in a
    speculative config. ``own_keys`` are constructor options that ``config.json`` holds under their own names, beside those
    of all block drafters, each with what loaders take it for where it is missing; the drafter has them as attributes.
    ``full_vocabulary``: vLLM's code for it knows no draft vocabulary. ``newer_runner``: only vLLM's newer model runner has
    it.
    """

    name: str
    architecture: str
    method: str
    own_keys: Mapping[str, Any] = field(default_factory=dict)
    full_vocabulary: bool = False
    newer_runner: bool = False
