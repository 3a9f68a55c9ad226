"""Step times from a measured table: monotone, a staircase where CUDA graphs are captured, linear beyond."""

import json
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression, nnls

from dspark_lab.hardware.protocol import Floats, StepShape
from dspark_lab.validation import checked

SCHEMA = 1
REACH = 4
"""A table answers up to so many times its largest measured number of tokens, requests or context tokens."""
UNSTEADY = 0.2
"""A point whose interquartile range is above this share of its median is left out of a fit, and counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """Median seconds of a step over ``repeats``; ``num_tokens`` of all its requests together."""

    num_requests: int
    num_tokens: int
    num_context_tokens: int
    time_s: float
    iqr_s: float = 0.0
    repeats: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedDraft:
    num_requests: int
    time_s: float
    iqr_s: float = 0.0
    repeats: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was timed. ``graph_tokens``: the largest captured CUDA graph; None where steps are not padded to graphs.

    ``setting``: device, dtype, engine, versions, date; ``source`` and ``notice`` of published ones.
    """

    name: str
    target: str
    num_gpus: int
    steps: tuple[TimedStep, ...]
    drafts: tuple[TimedDraft, ...] = ()
    graph_tokens: int | None = None
    setting: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    notice: str = ""

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError(f"{self.name}: no step was timed")
        for point in (*self.steps, *self.drafts):
            if not 0 < point.time_s < np.inf:
                raise ValueError(f"{self.name}: {point} takes no positive time: measure it again or take it out")

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Measurement":
        """Raises ValueError for a file that is no measurement; it names the file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("schema") != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA}")
            steps = tuple(TimedStep(**entry) for entry in data.pop("steps"))
            drafts = tuple(TimedDraft(**entry) for entry in data.pop("drafts"))
            return cls(steps=steps, drafts=drafts, **data)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: not readable as a measured profile: {error}") from error


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over a whole number, never falling. Staircase up to ``graph`` (None: no staircase), a jump behind it."""

    at: Floats
    seconds: Floats
    graph: float | None
    slope: float  # beyond the last

    @classmethod
    def fit(cls, at: ArrayLike, seconds: ArrayLike, weights: ArrayLike, graph: float | None) -> "Curve":
        """Isotonic regression: unlike a running maximum, one slow outlier does not lift all that follow."""
        places, inverse = np.unique(np.asarray(at, float), return_inverse=True)
        medians = np.array([np.median(np.asarray(seconds, float)[inverse == i]) for i in range(len(places))])
        total = np.bincount(inverse, np.asarray(weights, float))
        found = isotonic_regression(medians, weights=total).x
        return cls(places, found, graph, _last_slope(places, found, graph))

    def __call__(self, number: Floats | float) -> Floats:
        asked = np.asarray(number, float)
        last = self.at[-1]
        inside = np.interp(asked, self.at, self.seconds)
        if self.graph is not None:
            padded = self.seconds[np.minimum(np.searchsorted(self.at, asked), len(self.at) - 1)]
            above = self.at[self.at > self.graph]
            staircase = asked <= (
                above[0] if len(above) else last
            )  # between the last graph and the first point: a jump
            inside = np.where(staircase, padded, inside)
        return inside + np.maximum(asked - last, 0) * self.slope


@dataclass(frozen=True, slots=True, kw_only=True)
class TableProfile:
    """A ``HardwareProfile`` from measurements: a curve over tokens, and seconds per context token and per request.

    Where context or requests were not varied independently of the tokens their slope is 0.
    """

    measurement: Measurement
    tokens: Curve
    request_s: float
    context_token_s: float
    draft: Curve | None
    largest: StepShape
    mape: float
    num_unsteady: int

    @classmethod
    def fit(cls, measurement: Measurement) -> "TableProfile":
        steady = [step for step in measurement.steps if step.iqr_s <= UNSTEADY * step.time_s]
        used = steady or list(measurement.steps)
        tokens = np.array([step.num_tokens for step in used], float)
        requests = np.array([step.num_requests for step in used], float)
        context = np.array([step.num_context_tokens for step in used], float)
        seconds = np.array([step.time_s for step in used])
        request_s, context_token_s = _slopes(tokens, requests, context, seconds)
        rest = seconds - request_s * requests - context_token_s * context
        if rest.min() <= 0:  # the slopes explain all of some step: noise
            request_s, context_token_s, rest = 0.0, 0.0, seconds
        weights = [step.repeats for step in used]
        curve = Curve.fit(tokens, rest, weights, measurement.graph_tokens)
        draft = None
        if measurement.drafts:
            timed = [(drafted.num_requests, drafted.time_s, drafted.repeats) for drafted in measurement.drafts]
            numbers, times, repeats = zip(*timed, strict=True)
            draft = Curve.fit(numbers, times, repeats, None)
        found = curve(tokens) + request_s * requests + context_token_s * context
        return cls(
            measurement=measurement,
            tokens=curve,
            request_s=request_s,
            context_token_s=context_token_s,
            draft=draft,
            largest=StepShape(int(requests.max()), int(tokens.max()), 0, int(context.max())),
            mape=float(np.abs(found / seconds - 1).mean()),
            num_unsteady=len(measurement.steps) - len(steady),
        )

    def verify_time_s(self, shape: StepShape) -> Floats:
        """Raises ValueError for a shape beyond ``REACH`` times the largest that was measured."""
        num_tokens = np.asarray(shape.num_verify_tokens) + shape.num_prefill_tokens
        for name, asked, known in (
            ("tokens", int(num_tokens.max()), self.largest.num_verify_tokens),
            ("requests", shape.num_requests, self.largest.num_requests),
            ("context tokens", shape.num_context_tokens, self.largest.num_context_tokens),
        ):
            if asked > REACH * known:
                raise ValueError(
                    f"profile {self.measurement.name} was measured up to {known} {name} a step and cannot tell {asked}: "
                    f"measure it with more (profile.*), or ask for less (simulate.*: loads, batch_tokens, lengths)"
                )
        return (
            self.tokens(num_tokens)
            + self.request_s * shape.num_requests
            + self.context_token_s * shape.num_context_tokens
        )

    def draft_time_s(self, *, num_requests: int, num_context_tokens: int = 0) -> float:
        """Raises ValueError where no draft was timed."""
        if self.draft is None:
            raise ValueError(
                f"profile {self.measurement.name} has no draft times: measure it in a run with a trained drafter"
            )
        return float(self.draft(num_requests))

    def extrapolated(self, shape: StepShape) -> str | None:
        """Why a step's time is no interpolation of what was measured; None if it is one."""
        num_tokens = int(np.max(shape.num_verify_tokens)) + shape.num_prefill_tokens
        found = [
            f"{name} {asked} > {known}"
            for name, asked, known in (
                ("num_tokens", num_tokens, self.largest.num_verify_tokens),
                ("num_requests", shape.num_requests, self.largest.num_requests),
                ("num_context_tokens", shape.num_context_tokens, self.largest.num_context_tokens),
            )
            if asked > known
        ]
        return f"extrapolated: {', '.join(found)}" if found else None


class MeasuredHardware:
    """``hardware=measured``: a profile that ``stages=profile`` wrote, or one that is shipped (by its name).

    ``memory_bytes`` of all devices beside the weights, for context; None: no limit.
    """

    @checked
    def __init__(self, *, name: str, path: str, memory_bytes: float | None) -> None:
        self.name, self.memory_bytes = name, memory_bytes
        found = Path(path).expanduser()
        shipped = files("dspark_lab") / "hardware" / "data" / f"{path}.json"
        if found.is_dir():
            found = found / "profile.json"
        if not found.is_file():
            found = Path(str(shipped))
        if not found.is_file():
            raise ValueError(
                f"path={path!r} is no profile.json, no run that has one and no shipped profile "
                f"({', '.join(shipped_names())})"
            )
        self.measurement = Measurement.load(found)


def shipped_names() -> list[str]:
    folder = Path(str(files("dspark_lab"))) / "hardware" / "data"
    return sorted(path.stem for path in folder.glob("*.json"))


def _last_slope(places: Floats, seconds: Floats, graph: float | None) -> float:
    """Of the last three points, of those on the same side of the jump."""
    first = 0 if graph is None else int(np.searchsorted(places, graph, side="right"))
    x, y = (values[max(first, len(places) - 3) :] for values in (places, seconds))
    if len(x) < 2:
        return float(seconds[-1] / places[-1])
    return max(float(np.polyfit(x, y, 1)[0]), 0.0)


def _slopes(tokens: Floats, requests: Floats, context: Floats, seconds: Floats) -> tuple[float, float]:
    """Seconds per request and per context token, from a non-negative linear fit in relative error."""
    varied = [column for column in (requests, context) if _independent(column, tokens)]
    if not varied:
        return 0.0, 0.0
    columns = np.stack([np.ones_like(tokens), tokens, *varied], 1)
    scale = np.abs(columns).max(0)
    found = nnls(columns / scale / seconds[:, None], np.ones_like(seconds))[0] / scale
    slopes = iter(found[2:])
    return tuple(float(next(slopes)) if _independent(column, tokens) else 0.0 for column in (requests, context))  # type: ignore[return-value]


def _independent(column: Floats, tokens: Floats) -> bool:
    """Whether it differs among steps of the same number of tokens."""
    return any(np.ptp(column[tokens == number]) > 0 for number in np.unique(tokens))
