"""What is simulated: a typed recipe that the pipeline carries out."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from dspark_lab.hardware.accelerator import Share
from dspark_lab.serving.simulator import Limits
from dspark_lab.serving.workload import Spread, Workload
from dspark_lab.validation import checked

Baseline = Literal["none", "mtp1", "fixed", "oracle"]


class Simulation:
    """Args:
    loads: clients (closed loop) or requests per second (poisson), one frontier point each.
    num_gpus: one number or several, whose points make one frontier; None: the fewest that hold the target.
    num_requests, batch_tokens: most in one step.
    baselines: *none*: no drafter; *mtp1*: one draft token from a head that takes ``mtp1_draft_share`` of the drafter's
        time and whose token is accepted as often as the drafter's first; *fixed*: every fixed length, with the first seed;
        *oracle*: knows which drafts will be accepted.
    """

    @checked
    def __init__(
        self,
        *,
        num_gpus: PositiveInt | tuple[PositiveInt, ...] | None,
        arrivals: Literal["closed", "poisson"],
        loads: tuple[PositiveFloat, ...],
        prompt_tokens: PositiveInt,
        output_tokens: PositiveInt,
        spread: Spread,
        client_gap_s: NonNegativeFloat,
        frontend_s: NonNegativeFloat,
        num_requests: PositiveInt,
        batch_tokens: PositiveInt,
        prefill: Literal["shared", "free"],
        memory_utilisation: Share,
        duration_s: PositiveFloat,
        warmup_s: NonNegativeFloat,
        seeds: tuple[int, ...],
        baselines: tuple[Baseline, ...],
        mtp1_draft_share: Share,
    ) -> None:
        if not loads or not seeds:
            raise ValueError(f"loads={list(loads)}, seeds={list(seeds)}: each needs at least one")
        if warmup_s >= duration_s:
            raise ValueError(f"warmup_s={warmup_s} leaves nothing of duration_s={duration_s}")
        if arrivals == "closed" and any(load != int(load) for load in loads):
            raise ValueError(f"loads={list(loads)}: clients of a closed loop are whole numbers")
        self.num_gpus: tuple[int | None, ...] = num_gpus if isinstance(num_gpus, tuple) else (num_gpus,)
        self.loads, self.seeds = loads, seeds
        self.workload = Workload(
            arrivals=arrivals,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            spread=spread,
            client_gap_s=client_gap_s,
            frontend_s=frontend_s,
        )
        self.limits = Limits(num_requests=num_requests, batch_tokens=batch_tokens, prefill=prefill)
        self.memory_utilisation = memory_utilisation
        self.duration_s, self.warmup_s = duration_s, warmup_s
        self.baselines, self.mtp1_draft_share = baselines, mtp1_draft_share
