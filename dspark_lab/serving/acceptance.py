"""What happens to drafts in a simulation: rounds that were recorded, or drawn from published acceptance statistics.

Both are the same thing, a table of rounds by request. A request of the simulation plays the rounds of one request of the
table in their order, so that easy and hard passages stay together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq
from scipy.special import betaincinv, expit, logit

from dspark_lab.hardware.protocol import Floats, Ints
from dspark_lab.records import ConfidenceSource, Trace

ROUNDS = 200
"""Drawn for each request of a published statistic; a longer request starts again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceTable:
    """N rounds of Q requests at full width K: all K drafts were verified, ``accepted`` [N] of them stood.

    ``confidence`` and ``top_probability`` [N, K] are conditional, or None. Request q has ``lengths[q]`` rounds from
    ``starts[q]``. ``origin``: measured, replayed or published.
    """

    name: str
    origin: str
    width: int
    accepted: Ints
    confidence: Floats | None
    starts: Ints
    lengths: Ints
    top_probability: Floats | None = None

    def confidence_by(self, source: ConfidenceSource | None) -> Floats | None:
        return {"head": self.confidence, "probability": self.top_probability, None: None}[source]

    @property
    def acceptance_length(self) -> float:
        return 1 + float(self.accepted.mean())

    def narrowed(self, width: int, *, name: str | None = None) -> "AcceptanceTable":
        """The same rounds with fewer drafts: of a round that accepted a, min(a, ``width``) stand.

        Raises:
            ValueError: more drafts than were verified when the rounds were recorded.
        """
        if not 0 < width <= self.width:
            raise ValueError(
                f"num_draft_tokens={width}, but the rounds of {self.name} were recorded with {self.width} drafts verified: "
                f"what the target makes of more is not known. Record them wider, or ask for at most {self.width}"
            )
        return replace(
            self,
            name=name or self.name,
            width=width,
            accepted=np.minimum(self.accepted, width),
            confidence=None if self.confidence is None else self.confidence[:, :width],
            top_probability=None if self.top_probability is None else self.top_probability[:, :width],
        )


def from_traces(traces: Sequence[Trace], *, name: str, origin: str, num_draft_tokens: int | None) -> AcceptanceTable:
    """Recorded rounds; ``num_draft_tokens`` None: as many as the widest round has.

    A drafter may offer fewer tokens in a round. All of them accepted, such a round does not tell what the next one
    would have met; a round that ended in a rejection tells all.

    Raises:
        ValueError: no round, or rounds recorded at less than the width asked.
    """
    kept = [trace for trace in traces if trace.steps]
    if not kept:
        raise ValueError(f"the traces of {name} hold no verify step: evaluate more prompts")
    steps = [step for trace in kept for step in trace.steps]
    recorded = max(step.num_draft_tokens for step in steps)
    width = num_draft_tokens or recorded
    censored = [step for step in steps if step.num_accepted == step.num_draft_tokens < width]
    if width > recorded or len(censored) > 0.01 * len(steps):
        raise ValueError(
            f"num_draft_tokens={width}, but {len(censored)} of {len(steps)} rounds of {name} ended with fewer verified and "
            f"all accepted (widest: {recorded}): what the target makes of more is not known. Record them at full width "
            f"(evaluate.num_draft_tokens={width}), or ask for less"
        )
    lengths = np.array([len(trace.steps) for trace in kept])
    return AcceptanceTable(
        name=name,
        origin=origin,
        width=width,
        accepted=np.array([min(step.num_accepted, width) for step in steps]),
        confidence=_estimates([step.confidence for step in steps], width),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        top_probability=_estimates([step.top_probability for step in steps], width),
    )


def _estimates(by_step: Sequence[tuple[float, ...] | None], width: int) -> Floats | None:
    """[N, K], 0 in slots that were not drafted; None where a step has none."""
    found = np.zeros((len(by_step), width))
    for row, told in zip(found, by_step, strict=True):
        if told is None:
            return None
        row[: len(told)] = told[:width]
    return found


def solve_bernoulli(acceptance_length: float, num_draft_tokens: int) -> float:
    """The conditional acceptance p, the same at every position, with 1 + p + p² + ... + p^K = ``acceptance_length``."""
    _check_length(acceptance_length, num_draft_tokens)
    powers = np.arange(num_draft_tokens + 1)
    return float(brentq(lambda p: (p**powers).sum() - acceptance_length, 0.0, 1.0))  # type: ignore[arg-type]


def solve_beta(acceptance_length: float, num_draft_tokens: int, concentration: float) -> float:
    """The mean of a Beta distribution of requests' p, with that concentration (a + b), whose requests together accept so.

    Uses E[p^k] = product over i < k of (a + i) / (a + b + i).
    """
    _check_length(acceptance_length, num_draft_tokens)
    steps = np.arange(num_draft_tokens)

    def surplus(mean: float) -> float:
        return 1 + np.cumprod((concentration * mean + steps) / (concentration + steps)).sum() - acceptance_length

    return float(brentq(surplus, 0.0, 1.0))  # type: ignore[arg-type]


def synthesize(
    acceptance_lengths: Mapping[str, float],
    *,
    name: str,
    num_draft_tokens: int,
    concentration: float | None,
    confidence_noise: float,
    confidence_shift: float,
    num_requests: int,
    seed: int,
) -> AcceptanceTable:
    """Rounds with published acceptance lengths, one a domain; each domain has ``num_requests`` requests.

    Args:
        concentration: of the Beta distribution from which each request's p is drawn; None: all of a domain are alike.
        confidence_noise: standard deviation, in logits, of each round's confidence around p.
        confidence_shift: in logits; above 0 the drafter is over-confident.
    """
    generator = np.random.default_rng(seed)
    accepted, chances = [], []
    for length in acceptance_lengths.values():
        if concentration is None:
            chance = np.full(num_requests, solve_bernoulli(length, num_draft_tokens))
        else:
            mean = solve_beta(length, num_draft_tokens, concentration)
            # Equal shares of the distribution: with a few requests, draws would miss the published length.
            chance = _beta_quantiles(mean * concentration, (1 - mean) * concentration, num_requests)
        drawn = generator.random((num_requests, ROUNDS, num_draft_tokens)) < chance[:, None, None]
        accepted.append(np.minimum.accumulate(drawn, axis=2).sum(2).reshape(-1))
        chances.append(np.repeat(chance, ROUNDS))
    rounds = np.concatenate(accepted)
    known = logit(np.clip(np.concatenate(chances), 1e-6, 1 - 1e-6))[:, None]
    noise = confidence_noise * generator.standard_normal((len(rounds), num_draft_tokens))
    lengths = np.full(len(rounds) // ROUNDS, ROUNDS)
    return AcceptanceTable(
        name=name,
        origin="published",
        width=num_draft_tokens,
        accepted=rounds,
        confidence=expit(known + confidence_shift + noise),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
    )


def _beta_quantiles(a: float, b: float, number: int) -> Floats:
    return betaincinv(a, b, (np.arange(number) + 0.5) / number)


def _check_length(acceptance_length: float, num_draft_tokens: int) -> None:
    if not 1 < acceptance_length < num_draft_tokens + 1:
        raise ValueError(
            f"acceptance_length={acceptance_length}: with num_draft_tokens={num_draft_tokens} it lies between 1 and "
            f"{num_draft_tokens + 1}"
        )
