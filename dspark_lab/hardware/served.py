"""What a target and a drafter weigh when they are served, as data: bytes and parameters, no weights."""

from collections.abc import Mapping

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from dspark_lab.hardware.accelerator import STRICT, Accelerator, Number
from dspark_lab.hardware.protocol import Floats


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Experts:
    """Routed experts: ``num_layers`` layers of ``num_experts``, of which a token visits ``num_per_token``."""

    num_layers: PositiveInt
    num_experts: PositiveInt
    num_per_token: PositiveInt
    parameters: PositiveFloat  # of one expert of one layer
    bytes_per_parameter: PositiveFloat

    def covered(self, num_tokens: Floats | float) -> Floats:
        """Expected number of distinct experts of one layer that that many *independent* tokens visit."""
        return self.num_experts * (1 - (1 - self.num_per_token / self.num_experts) ** np.asarray(num_tokens, float))

    @property
    def layer_bytes(self) -> float:
        """Of one expert in all layers."""
        return self.num_layers * self.parameters * self.bytes_per_parameter


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ServedTarget:
    """Args:
    dense_parameters: read in every step: attention, shared experts, dense layers, head; not the embedding.
    replicated_parameters: of those, the ones that every GPU reads whole.
    active_parameters: multiplied with one token.
    compute: number format of the products.
    context_bytes_per_token: what attention reads per token of context; ``context_shards``: most GPUs that share it
        (1: every GPU holds all of it, as with a latent cache; else the key-value heads).
    state_bytes_per_request: recurrent state, read and written in every step.
    """

    num_layers: PositiveInt
    hidden_size: PositiveInt
    dense_parameters: PositiveFloat
    dense_bytes_per_parameter: PositiveFloat
    replicated_parameters: NonNegativeFloat
    active_parameters: PositiveFloat
    compute: Number
    experts: Experts | None
    context_bytes_per_token: NonNegativeFloat
    context_shards: PositiveInt
    state_bytes_per_request: NonNegativeFloat
    sources: Mapping[str, str]

    def weights_bytes(self, num_gpus: int) -> float:
        """On each of ``num_gpus`` GPUs that share the target."""
        whole = self.replicated_parameters * self.dense_bytes_per_parameter
        shared = self.dense_parameters * self.dense_bytes_per_parameter - whole
        if self.experts is not None:
            shared += self.experts.num_experts * self.experts.layer_bytes
        return whole + shared / num_gpus


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ServedDrafter:
    """``num_passes`` forwards of ``parameters`` draft ``num_draft_tokens`` tokens (block drafters: one pass).

    ``context_bytes_per_token``: of the drafter's own cache.
    """

    name: str
    num_draft_tokens: NonNegativeInt
    num_passes: PositiveInt
    parameters: NonNegativeFloat
    bytes_per_parameter: PositiveFloat
    context_bytes_per_token: NonNegativeFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What is left for context on each GPU, and what a request takes of it."""

    free_bytes: float
    bytes_per_token: float
    bytes_per_request: float

    def needed_bytes(self, num_tokens: int) -> float:
        return self.bytes_per_request + num_tokens * self.bytes_per_token


def capacity(
    accelerator: Accelerator,
    target: ServedTarget,
    drafter: ServedDrafter | None,
    *,
    num_gpus: int,
    memory_utilisation: float,
) -> Capacity:
    """Room for context beside the weights of target and drafter.

    Raises:
        ValueError: the weights do not fit, or leave nothing; it says how many GPUs would do.
    """
    free = _free_bytes(accelerator, target, drafter, num_gpus, memory_utilisation)
    if free <= 0:
        needed = fewest_gpus(accelerator, target, drafter, memory_utilisation=memory_utilisation)
        raise ValueError(
            f"num_gpus={num_gpus}: {accelerator.name} has {accelerator.memory_bytes / 1e9:.0f} GB a GPU, the target "
            f"needs {target.weights_bytes(num_gpus) / 1e9:.0f} GB on each of {num_gpus}: use at least {needed} GPUs"
        )
    shards = min(num_gpus, target.context_shards)
    per_token = target.context_bytes_per_token / shards
    if drafter is not None:
        per_token += drafter.context_bytes_per_token / shards
    return Capacity(
        free_bytes=free, bytes_per_token=per_token, bytes_per_request=target.state_bytes_per_request / num_gpus
    )


def fewest_gpus(
    accelerator: Accelerator, target: ServedTarget, drafter: ServedDrafter | None, *, memory_utilisation: float
) -> int:
    """The smallest power of two of GPUs whose memory holds the weights and leaves room.

    Raises:
        ValueError: not even all GPUs of one link domain do.
    """
    number = 1
    while number <= accelerator.link_domain:
        if _free_bytes(accelerator, target, drafter, number, memory_utilisation) > 0:
            return number
        number *= 2
    raise ValueError(
        f"the target does not fit into the {accelerator.link_domain} GPUs that {accelerator.name} links: choose hardware "
        "with more memory"
    )


def _free_bytes(
    accelerator: Accelerator,
    target: ServedTarget,
    drafter: ServedDrafter | None,
    num_gpus: int,
    memory_utilisation: float,
) -> float:
    weights = target.weights_bytes(num_gpus)
    if drafter is not None:
        weights += drafter.parameters * drafter.bytes_per_parameter / num_gpus
    return memory_utilisation * accelerator.memory_bytes - weights
