"""Several ways of serving one target on one hardware, over loads and seeds: the points of their frontiers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dspark_lab.hardware.deployment import Deployment
from dspark_lab.hardware.protocol import Floats, HardwareProfile, StepShape
from dspark_lab.scheduler.protocol import VerifyScheduler
from dspark_lab.serving.acceptance import AcceptanceTable
from dspark_lab.serving.frontier import Point
from dspark_lab.serving.metrics import Estimate, serving_metrics
from dspark_lab.serving.recipe import Simulation
from dspark_lab.serving.simulator import simulate

MakeScheduler = Callable[[HardwareProfile], VerifyScheduler | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way of serving. ``draft_share``: of the profile's draft time. ``num_seeds``: the first ones; None: all."""

    name: str
    acceptance: AcceptanceTable | None
    make_scheduler: MakeScheduler = lambda profile: None
    draft_share: float = 1.0
    num_seeds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One scheme at one load. ``extrapolated``: why its step times go beyond what was observed, or None."""

    scheme: str
    load: float
    num_gpus: int
    metrics: Mapping[str, Estimate]
    extrapolated: str | None

    @property
    def point(self) -> Point | None:
        values = {name: estimate.value for name, estimate in self.metrics.items()}
        return Point.of(values, load=self.load, num_gpus=self.num_gpus)


@dataclass(frozen=True, slots=True)
class SharedDraft:
    """A profile whose drafts take a share of another's."""

    profile: HardwareProfile
    share: float

    def verify_time_s(self, shape: StepShape) -> Floats:
        return self.profile.verify_time_s(shape)

    def draft_time_s(self, *, num_requests: int, num_context_tokens: int = 0) -> float:
        drafted = self.profile.draft_time_s(num_requests=num_requests, num_context_tokens=num_context_tokens)
        return self.share * drafted


def simulate_load(scheme: Scheme, deployment: Deployment, recipe: Simulation, load: float) -> Simulated:
    """All seeds of one scheme at one load; each has a scheduler of its own."""
    profile = SharedDraft(deployment.profile, scheme.draft_share)
    logs = [
        simulate(
            profile=profile,
            acceptance=scheme.acceptance,
            scheduler=scheme.make_scheduler(profile) if scheme.acceptance else None,
            workload=recipe.workload,
            load=load,
            limits=recipe.limits,
            room=deployment.room,
            duration_s=recipe.duration_s,
            seed=seed,
        )
        for seed in recipe.seeds[: scheme.num_seeds]
    ]
    sizes = [log.largest for log in logs]
    largest = StepShape(
        max(shape.num_requests for shape in sizes),
        max(int(shape.num_verify_tokens) for shape in sizes),
        0,
        max(shape.num_context_tokens for shape in sizes),
    )
    return Simulated(
        scheme=scheme.name,
        load=load,
        num_gpus=deployment.num_gpus,
        metrics=serving_metrics(logs, warmup_s=recipe.warmup_s, num_gpus=deployment.num_gpus),
        extrapolated=deployment.profile.extrapolated(largest),
    )
