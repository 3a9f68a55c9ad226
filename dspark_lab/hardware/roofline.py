"""Step time from bytes, operations and latencies: for hardware that nobody here has.

A step reads all dense weights, the experts that its tokens visit, and the context of its requests; it multiplies, it
all-reduces twice a layer, and it has floors that no bandwidth explains (at batch 1 they are half of a step).
"""

from dataclasses import dataclass

import numpy as np

from dspark_lab.hardware.accelerator import Accelerator, StepCosts
from dspark_lab.hardware.protocol import Floats, StepShape
from dspark_lab.hardware.served import ServedDrafter, ServedTarget

ACTIVATION_BYTES = 2  # of one number that is all-reduced


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A ``HardwareProfile`` of a target (and drafter) on ``num_gpus`` GPUs that share every matrix."""

    accelerator: Accelerator
    target: ServedTarget
    num_gpus: int
    costs: StepCosts
    drafter: ServedDrafter | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_gpus <= self.accelerator.link_domain:
            raise ValueError(
                f"num_gpus={self.num_gpus}: {self.accelerator.name} links {self.accelerator.link_domain}; step times across "
                "its network are not modelled"
            )
        if self.target.compute not in self.accelerator.flops:
            raise ValueError(
                f"compute={self.target.compute!r} of the target: {self.accelerator.name} has no figure for it "
                f"(it has {', '.join(self.accelerator.flops)})"
            )

    def verify_time_s(self, shape: StepShape) -> Floats:
        num_tokens = np.asarray(shape.num_verify_tokens, float) + shape.num_prefill_tokens
        memory, compute = self._memory_s(shape), self._compute_s(num_tokens)
        # The two overlap: neither their sum nor quite their maximum.
        overlapped = (memory**4 + compute**4) ** 0.25
        costs, layers = self.costs, self.target.num_layers
        floors = costs.step_floor_s + layers * costs.layer_floor_s
        return (
            overlapped
            + self._communication_s(num_tokens)
            + floors
            + costs.request_s * shape.num_requests
            + costs.token_s * num_tokens
        )

    def draft_time_s(self, *, num_requests: int, num_context_tokens: int = 0) -> float:
        if self.drafter is None or self.drafter.num_draft_tokens == 0:
            raise ValueError("this profile has no drafter: give one to ask for its time")
        read = (
            self.drafter.parameters * self.drafter.bytes_per_parameter / self._bytes_per_s(self.costs.dense_efficiency)
        )
        return (
            self.drafter.num_passes * (self.costs.draft_floor_s + read / self.num_gpus)
            + self.costs.draft_request_s * num_requests
        )

    def _bytes_per_s(self, efficiency: float) -> float:
        return self.accelerator.memory_bytes_per_s * efficiency

    def _memory_s(self, shape: StepShape) -> Floats:
        target, costs = self.target, self.costs
        whole = target.replicated_parameters * target.dense_bytes_per_parameter
        shared = target.dense_parameters * target.dense_bytes_per_parameter - whole
        seconds = np.asarray((whole + shared / self.num_gpus) / self._bytes_per_s(costs.dense_efficiency))
        if target.experts is not None:
            further = np.asarray(shape.num_verify_tokens, float) - shape.num_requests + shape.num_prefill_tokens
            covered = target.experts.covered(shape.num_requests + costs.expert_novelty * further)
            read = covered * target.experts.layer_bytes / self.num_gpus / self._bytes_per_s(costs.expert_efficiency)
            seconds = seconds + read + target.experts.num_layers * costs.expert_layer_floor_s
        context = shape.num_context_tokens * target.context_bytes_per_token / min(self.num_gpus, target.context_shards)
        state = 2 * shape.num_requests * target.state_bytes_per_request / self.num_gpus
        return seconds + (context + state) / self._bytes_per_s(costs.context_efficiency)

    def _compute_s(self, num_tokens: Floats) -> Floats:
        peak = self.accelerator.flops[self.target.compute] * self.costs.compute_efficiency
        return 2 * num_tokens * self.target.active_parameters / (self.num_gpus * peak)

    def _communication_s(self, num_tokens: Floats) -> Floats:
        if self.num_gpus == 1:
            return np.zeros_like(num_tokens)
        if self.accelerator.link_bytes_per_s is None:
            raise ValueError(f"link_bytes_per_s of {self.accelerator.name} is null: use num_gpus=1")
        moved = 2 * (self.num_gpus - 1) / self.num_gpus * num_tokens * self.target.hidden_size * ACTIVATION_BYTES
        latency = self.accelerator.allreduce_latency_s(self.num_gpus)
        return 2 * self.target.num_layers * (latency + moved / self.accelerator.link_bytes_per_s)
