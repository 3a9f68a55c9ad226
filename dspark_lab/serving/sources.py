"""Where a simulation's acceptance comes from: this run's traces, or published statistics that say so."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from dspark_lab.evaluation.traces import read_traces
from dspark_lab.hardware.served import ServedDrafter
from dspark_lab.serving.acceptance import AcceptanceTable, from_traces, synthesize
from dspark_lab.validation import checked


class RunTraces:
    """``traces=run``. Nulls: as wide as recorded; EAGLE-3 drafts in one pass a token, block drafters in one."""

    @checked
    def __init__(
        self,
        *,
        name: str,
        origin: Literal["measured", "replayed"],
        num_draft_tokens: PositiveInt | None,
        num_passes: PositiveInt | None,
        num_parameters: PositiveFloat | None,
        bytes_per_parameter: PositiveFloat,
        context_bytes_per_token: NonNegativeFloat,
    ) -> None:
        self.name, self.origin, self.num_draft_tokens = name, origin, num_draft_tokens
        self.num_passes, self.num_parameters = num_passes, num_parameters
        self.bytes_per_parameter = bytes_per_parameter
        self.context_bytes_per_token = context_bytes_per_token
        self.source = "this run"

    def table(self, path: Path) -> AcceptanceTable:
        """Raises ValueError for a run without such traces, or narrower ones."""
        traces = read_traces(path, origin=self.origin)
        return from_traces(traces, name=self.name, origin=self.origin, num_draft_tokens=self.num_draft_tokens)

    def drafter(self, name: str, *, num_draft_tokens: int, num_parameters: float) -> ServedDrafter:
        return ServedDrafter(
            name=name,
            num_draft_tokens=num_draft_tokens,
            num_passes=self.num_passes or (num_draft_tokens if name == "eagle3" else 1),
            parameters=num_parameters,
            bytes_per_parameter=self.bytes_per_parameter,
            context_bytes_per_token=self.context_bytes_per_token,
        )


class PublishedAcceptance:
    """``traces=published/...``: rounds drawn so that each domain has its published acceptance length (``synthesize``)."""

    @checked
    def __init__(
        self,
        *,
        name: str,
        target: str,
        num_draft_tokens: PositiveInt,
        acceptance_lengths: Mapping[str, float],
        concentration: PositiveFloat | None,
        confidence_noise: NonNegativeFloat,
        confidence_shift: float,
        num_requests: PositiveInt,
        drafter: ServedDrafter,
        source: str,
    ) -> None:
        if not source:
            raise ValueError("source is empty: say where the acceptance lengths were published")
        self.name, self.target, self.num_draft_tokens = name, target, num_draft_tokens
        self.acceptance_lengths, self.concentration = acceptance_lengths, concentration
        self.confidence_noise, self.confidence_shift = confidence_noise, confidence_shift
        self.num_requests, self.drafter, self.source = num_requests, drafter, source
        self.origin = "published"

    def table(self, *, target_name: str, seed: int) -> AcceptanceTable:
        """Raises ValueError for another target than the published one."""
        if target_name != self.target:
            raise ValueError(f"traces={self.name} are of target={self.target}, this run has target={target_name}")
        return synthesize(
            self.acceptance_lengths,
            name=self.name,
            num_draft_tokens=self.num_draft_tokens,
            concentration=self.concentration,
            confidence_noise=self.confidence_noise,
            confidence_shift=self.confidence_shift,
            num_requests=self.num_requests,
            seed=seed,
        )


Traces = RunTraces | PublishedAcceptance
"""What a ``traces=`` option builds."""
