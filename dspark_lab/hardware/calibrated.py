"""A roofline whose unknown costs are fitted to observed step times, and which says how far to trust it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from dspark_lab.hardware.accelerator import Calibration, Observation, StepCosts
from dspark_lab.hardware.protocol import Floats, StepShape
from dspark_lab.hardware.roofline import Roofline

UNCALIBRATED_BAND = 0.25
"""How far step times may be off where nothing was measured, as a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One observed time: of a verify step, and of the draft of ``num_drafting`` requests with it."""

    shape: StepShape
    time_s: float
    num_drafting: int = 0
    num_gpus: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.time_s < np.inf:
            raise ValueError(f"time_s={self.time_s} of a step of {self.shape}: a step takes a positive time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Errors are relative. ``on_bounds``: fitted costs that ended on a bound, so the data did not determine them.

    ``left_out_mape``: mean error of each observation predicted from the others; None where those cannot determine the
    costs.
    """

    mape: float
    worst: float
    left_out_mape: float | None
    num_observations: int
    num_fitted: int
    on_bounds: tuple[str, ...]

    def __str__(self) -> str:
        left_out = "" if self.left_out_mape is None else f", {100 * self.left_out_mape:.1f} % left out"
        bounds = f", on a bound: {', '.join(self.on_bounds)}" if self.on_bounds else ""
        return (
            f"{self.num_fitted} costs fitted to {self.num_observations} observations: error {100 * self.mape:.1f} % "
            f"(largest {100 * self.worst:.1f} %{left_out}){bounds}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A ``HardwareProfile``: a fitted roofline, and where observations support it. Without any, ``fit`` is None."""

    roofline: Roofline
    fit: Fit | None
    largest: Mapping[str, int]  # observed, by name
    observed_gpus: frozenset[int]

    def verify_time_s(self, shape: StepShape) -> Floats:
        return self.roofline.verify_time_s(shape)

    def draft_time_s(self, *, num_requests: int, num_context_tokens: int = 0) -> float:
        return self.roofline.draft_time_s(num_requests=num_requests, num_context_tokens=num_context_tokens)

    def extrapolated(self, shape: StepShape) -> str | None:
        """Why a step's time is no interpolation of what was observed; None if it is one."""
        if self.fit is None:
            return f"extrapolated: nothing was observed, ±{100 * UNCALIBRATED_BAND:.0f} %"
        found = [] if self.roofline.num_gpus in self.observed_gpus else [f"num_gpus {self.roofline.num_gpus}"]
        for name, value in _sizes(shape).items():
            if value > self.largest[name]:
                found.append(f"{name} {value} > {self.largest[name]}")
        return f"extrapolated: {', '.join(found)}" if found else None

    @property
    def band(self) -> float:
        """Relative half-width that step times deserve where they are not extrapolated."""
        return UNCALIBRATED_BAND if self.fit is None else max(self.fit.worst, self.fit.left_out_mape or 0.0)


def calibrate(
    base: Roofline,
    observed: Sequence[Timed],
    *,
    fitted: Mapping[str, tuple[float, float]],
    fitted_by_gpus: Mapping[str, tuple[float, float]] | None = None,
) -> Calibrated:
    """Fit the named costs of ``base`` within their bounds, in relative error (soft L1: one bad point does not rule).

    Costs of ``fitted_by_gpus`` have one value for each observed number of GPUs; ``base.num_gpus`` takes its own, or the
    nearest number's.
    """
    layout = _Layout.of(observed, fitted, fitted_by_gpus or {})
    vector = _solve(base, observed, layout)
    errors = np.abs(_residuals(vector, base, observed, layout))
    left_out = None
    if len(observed) > len(layout.names):
        kept = [[other for other in observed if other is not timed] for timed in observed]
        if all(_Layout.of(rest, fitted, fitted_by_gpus or {}).names == layout.names for rest in kept):
            found = [
                abs(_residuals(_solve(base, rest, layout, start=vector), base, [timed], layout)[0])
                for timed, rest in zip(observed, kept, strict=True)
            ]
            left_out = float(np.mean(found))
    sizes = [_sizes(timed.shape) for timed in observed]
    return Calibrated(
        roofline=replace(base, costs=layout.costs(base.costs, vector, base.num_gpus)),
        fit=Fit(
            mape=float(errors.mean()),
            worst=float(errors.max()),
            left_out_mape=left_out,
            num_observations=len(observed),
            num_fitted=len(layout.names),
            on_bounds=layout.on_bounds(vector),
        ),
        largest={name: max(size[name] for size in sizes) for name in sizes[0]},
        observed_gpus=frozenset(timed.num_gpus for timed in observed),
    )


def calibrate_published(base: Roofline, calibration: Calibration) -> Calibrated:
    """``calibrate`` to the published rates of a ``Calibration``."""
    return calibrate(
        base,
        [timed_round(entry) for entry in calibration.observations],
        fitted=calibration.fitted,
        fitted_by_gpus=calibration.fitted_by_gpus,
    )


def timed_round(entry: Observation) -> Timed:
    """The decode round behind a published rate."""
    shape = StepShape(
        num_requests=entry.num_requests,
        num_verify_tokens=entry.num_requests * (1 + entry.num_draft_tokens),
        num_context_tokens=entry.num_context_tokens,
    )
    drafting = entry.num_requests if entry.num_draft_tokens else 0
    return Timed(shape=shape, time_s=entry.round_s, num_drafting=drafting, num_gpus=entry.num_gpus)


def uncalibrated(base: Roofline) -> Calibrated:
    return Calibrated(roofline=base, fit=None, largest={}, observed_gpus=frozenset())


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which cost stands where in the vector that is fitted; a number of GPUs of None is common to all."""

    names: tuple[tuple[str, int | None], ...]
    bounds: tuple[tuple[float, float], ...]

    @classmethod
    def of(
        cls,
        observed: Sequence[Timed],
        fitted: Mapping[str, tuple[float, float]],
        by_gpus: Mapping[str, tuple[float, float]],
    ) -> "_Layout":
        numbers = sorted({timed.num_gpus for timed in observed})
        entries = [((name, None), bounds) for name, bounds in fitted.items()]
        entries += [((name, number), bounds) for name, bounds in by_gpus.items() for number in numbers]
        return cls(tuple(name for name, _ in entries), tuple(bounds for _, bounds in entries))

    def costs(self, base: StepCosts, vector: Floats, num_gpus: int) -> StepCosts:
        observed = sorted({number for _, number in self.names if number is not None})
        nearest = min(observed, key=lambda number: abs(np.log2(number / num_gpus)), default=None)
        values = {
            name: float(value)
            for (name, number), value in zip(self.names, vector, strict=True)
            if number is None or number == nearest
        }
        return replace(base, **values)

    def scale(self) -> tuple[Floats, Floats]:
        low, high = np.array(self.bounds, float).T
        return low, high

    def on_bounds(self, vector: Floats) -> tuple[str, ...]:
        low, high = self.scale()
        near = np.minimum(vector - low, high - vector) < 1e-3 * (high - low)
        return tuple(
            name if number is None else f"{name} at {number} GPUs"
            for (name, number), on in zip(self.names, near, strict=True)
            if on
        )


def _solve(base: Roofline, observed: Sequence[Timed], layout: _Layout, start: Floats | None = None) -> Floats:
    low, high = layout.scale()
    if start is None:
        start = low + 0.3 * (high - low)

    def residuals(unit: Floats) -> Floats:
        return _residuals(low + unit * (high - low), base, observed, layout)

    unit = np.clip((start - low) / (high - low), 1e-3, 1 - 1e-3)
    # Costs differ by orders of magnitude: each is fitted as a share of its bounds.
    found = least_squares(residuals, unit, bounds=(0, 1), loss="soft_l1", f_scale=0.05, xtol=1e-12, ftol=1e-12)
    return low + found.x * (high - low)


def _residuals(vector: Floats, base: Roofline, observed: Sequence[Timed], layout: _Layout) -> Floats:
    profiles = {
        number: replace(base, num_gpus=number, costs=layout.costs(base.costs, vector, number))
        for number in {timed.num_gpus for timed in observed}
    }
    found = []
    for timed in observed:
        profile = profiles[timed.num_gpus]
        seconds = float(profile.verify_time_s(timed.shape))
        if timed.num_drafting:
            seconds += profile.draft_time_s(num_requests=timed.num_drafting)
        found.append(seconds / timed.time_s - 1)
    return np.array(found)


def _sizes(shape: StepShape) -> dict[str, int]:
    return {
        "num_requests": shape.num_requests,
        "num_tokens": int(np.max(shape.num_verify_tokens)) + shape.num_prefill_tokens,
        "num_context_tokens": shape.num_context_tokens,
    }
