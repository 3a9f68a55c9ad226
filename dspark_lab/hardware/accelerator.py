"""What hardware is, as data: the figures of its data sheet, and the costs that no data sheet has."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid")
Share = Annotated[float, Field(gt=0, le=1)]
Number = Literal["fp4", "fp8", "bf16", "fp32"]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class StepCosts:
    """What a data sheet does not say, and a fit may: shares of the peak figures that are reached, and latency floors.

    ``expert_novelty`` κ: how many independent tokens a further token *of the same request* is worth when distinct experts
    are counted (1: routed as if it had nothing to do with its request). ``token_s`` and ``request_s`` are added per token
    and per decoding request of a step; ``draft_request_s`` per drafting request.
    """

    dense_efficiency: Share
    expert_efficiency: Share
    context_efficiency: Share
    compute_efficiency: Share
    expert_novelty: Share
    expert_layer_floor_s: NonNegativeFloat
    layer_floor_s: NonNegativeFloat
    step_floor_s: NonNegativeFloat
    request_s: NonNegativeFloat
    token_s: NonNegativeFloat
    draft_floor_s: NonNegativeFloat
    draft_request_s: NonNegativeFloat


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Observation:
    """One published or measured decode point: ``num_requests`` at once, each with ``num_draft_tokens`` verified a round.

    A round lasts ``acceptance_length / tokens_per_s_per_user`` seconds: one verify step, and one draft if any is drafted.
    """

    num_gpus: PositiveInt
    num_requests: PositiveInt
    num_draft_tokens: int
    acceptance_length: PositiveFloat
    tokens_per_s_per_user: PositiveFloat
    num_context_tokens: int = 0
    source: str

    @property
    def round_s(self) -> float:
        return self.acceptance_length / self.tokens_per_s_per_user


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Calibration:
    """Observations of one target, and which costs are fitted to them, within which bounds.

    ``fitted`` are common to all numbers of GPUs, ``fitted_by_gpus`` are one a number of GPUs.
    """

    fitted: Mapping[str, tuple[float, float]]
    fitted_by_gpus: Mapping[str, tuple[float, float]]
    observations: tuple[Observation, ...]

    def __post_init__(self) -> None:
        unknown = [name for name in (*self.fitted, *self.fitted_by_gpus) if name not in StepCosts.__dataclass_fields__]
        if unknown or not self.observations:
            known = ", ".join(StepCosts.__dataclass_fields__)
            raise ValueError(
                f"fitted costs {unknown} are unknown: choose from {known}"
                if unknown
                else "observations is empty: a fit needs at least one"
            )


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Accelerator:
    """One GPU (or CPU) and what connects several. Figures are dense, bytes are bytes, seconds are seconds.

    Args:
        memory_bytes: usable, as the device reports it.
        flops: multiply-adds count two, by number format.
        link_bytes_per_s: one direction.
        network_bytes_per_s: of a GPU's own network card, one direction; None: it has none.
        link_domain: GPUs that it connects; ``gpus_per_node``: of them in one machine.
        allreduce_floor_s: latency of one all-reduce by number of GPUs; the largest number given stands for larger ones.
        costs: before any calibration.
        calibrations: by the target's name.
        sources: where each figure is from.
    """

    name: str
    memory_bytes: PositiveFloat
    memory_bytes_per_s: PositiveFloat
    flops: Mapping[Number, PositiveFloat]
    link_bytes_per_s: PositiveFloat | None
    network_bytes_per_s: PositiveFloat | None
    link_domain: PositiveInt
    gpus_per_node: PositiveInt
    allreduce_floor_s: Mapping[int, NonNegativeFloat]
    costs: StepCosts
    calibrations: Mapping[str, Calibration]
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        told = {name for name in self.__dataclass_fields__ if name not in ("name", "calibrations", "sources")}
        if missing := sorted(told - self.sources.keys()):
            raise ValueError(f"sources has none for {', '.join(missing)}: say where each figure is from")

    def allreduce_latency_s(self, num_gpus: int) -> float:
        """Of one all-reduce; 0 for one GPU."""
        if num_gpus == 1:
            return 0.0
        known = sorted(self.allreduce_floor_s)
        if not known:
            raise ValueError(f"allreduce_floor_s of {self.name} is empty: {num_gpus} GPUs cannot be simulated on it")
        return self.allreduce_floor_s[next((number for number in known if number >= num_gpus), known[-1])]
