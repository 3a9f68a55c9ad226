"""Do a drafter's confidences mean what they say, and the temperatures after which they do. Pure functions over traces.

Sequential temperature scaling: Cheng et al. 2026, arXiv 2607.05147, section 3.2.1. The survival of slot k is the product
of the confidences up to it, the probability that its whole prefix is accepted; what is calibrated is the survival.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchmetrics.functional.classification import binary_auroc

from dspark_lab.evaluation.bootstrap import bootstrap_ratios, bootstrap_sums
from dspark_lab.records import ConfidenceSource, Trace

Floats = NDArray[np.float64]
CALIBRATION_FILE = "calibration.json"
SATURATED = 1e-7
"""Confidences are kept this far from 0 and 1: an fp32 sigmoid reaches both, its logit does not."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """N verify steps of a drafter that drafts up to K tokens; ``confidence`` is NaN in slots that were not drafted."""

    confidence: Floats  # [N, K], each given the slots before it
    accepted: NDArray[np.int64]  # [N] accepted drafts
    prompt: NDArray[np.int64]  # [N] index of the prompt

    def outcomes(self, slot: int) -> NDArray[np.bool_]:
        """[N] whether the whole prefix up to and including ``slot`` was accepted."""
        return self.accepted > slot

    def of(self, chosen: NDArray[np.bool_]) -> "Rounds":
        return Rounds(self.confidence[chosen], self.accepted[chosen], self.prompt[chosen])


@dataclass(frozen=True, slots=True)
class Bin:
    """A bar of the reliability diagram: rounds whose survival lies in it, their mean survival, the share accepted."""

    num_rounds: int
    survival: float
    accepted: float


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one slot's survivals. ``ece``: expected calibration error, with a 95 % interval over prompts.

    ``ece_floor`` is what the error of perfectly calibrated survivals would be with so many rounds: it is never 0.
    ``auroc`` is None where every prefix was accepted, or none.
    """

    ece: float
    ece_low: float
    ece_high: float
    ece_floor: float
    brier: float
    brier_low: float
    brier_high: float
    auroc: float | None
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """Draft position ``k`` from 1: its temperature, and its survivals with and without, on held-out prompts."""

    k: int
    temperature: float
    num_fit_rounds: int
    num_rounds: int
    before: Quality
    after: Quality


def gather_rounds(traces: Sequence[Trace], source: ConfidenceSource = "head") -> Rounds:
    """The rounds of ``traces``, without each answer's last: there the answer's end cut what was accepted.

    Raises:
        ValueError: the traces hold no confidences of that source.
    """
    steps = [(index, step) for index, trace in enumerate(traces) for step in trace.steps[:-1]]
    if any(step.confidence_by(source) is None for _, step in steps):
        raise ValueError(
            "the traces hold no confidences, so there is nothing to calibrate: this drafter has no confidence head; train "
            "with drafter=dspark drafter.confidence=true, or set scheduler.confidence=probability"
            if source == "head"
            else "the traces hold no probabilities (scheduler.confidence=probability): evaluate again"
        )
    confidence = np.full((len(steps), max((step.num_draft_tokens for _, step in steps), default=0)), np.nan)
    for row, (_, step) in enumerate(steps):
        confidence[row, : step.num_draft_tokens] = step.confidence_by(source)
    accepted = np.array([step.num_accepted for _, step in steps], np.int64)
    return Rounds(confidence, accepted, np.array([index for index, _ in steps], np.int64))


def split_rounds(rounds: Rounds, *, fit_share: float, min_rounds: int, seed: int) -> tuple[Rounds, Rounds]:
    """(to fit on, held out), whole prompts each: steps of one answer depend on each other.

    Raises:
        ValueError: a part has fewer than 2 prompts, or a slot of a part fewer than ``min_rounds`` rounds.
    """
    prompts = np.random.default_rng(seed).permutation(np.unique(rounds.prompt))
    fitted = np.isin(rounds.prompt, prompts[: round(fit_share * len(prompts))])
    parts = {"fitted": rounds.of(fitted), "held-out": rounds.of(~fitted)}
    for name, part in parts.items():
        drafted = (~np.isnan(part.confidence)).sum(0)
        fewest = int(drafted.min(initial=np.iinfo(np.int64).max)) if part.confidence.size else 0
        if len(np.unique(part.prompt)) < 2 or fewest < min_rounds:
            raise ValueError(
                f"the {name} part has {len(np.unique(part.prompt))} prompts (minimum 2) and {fewest} rounds at its rarest "
                f"draft position (minimum {min_rounds}): evaluate more prompts, or lower calibrate.min_rounds"
            )
    return parts["fitted"], parts["held-out"]


def fit_temperatures(rounds: Rounds, *, grid: Floats, num_bins: int) -> Floats:
    """[K], left to right: each the one of ``grid`` with which the survival, the earlier ones being fixed, errs least.

    Of equal ones the nearest to 1, which changes nothing.
    """
    grid = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]
    survival, chosen = np.ones(len(rounds.accepted)), []
    for slot in range(rounds.confidence.shape[1]):
        here = ~np.isnan(rounds.confidence[:, slot])
        candidates = survival[here, None] * _scaled(rounds.confidence[here, slot, None], grid)  # [n, G]
        outcomes = rounds.outcomes(slot)[here]
        errors = [calibration_error(column, outcomes, num_bins=num_bins) for column in candidates.T]
        best = int(np.argmin(errors))
        chosen.append(grid[best])
        survival[here] = candidates[:, best]
    return np.array(chosen)


def apply_temperatures(confidence: Floats, temperatures: Floats) -> Floats:
    """Calibrated confidences [..., k], k <= K, by the temperatures [K] of their slots.

    Raises:
        ValueError: more slots than temperatures.
    """
    num_slots = confidence.shape[-1]
    if num_slots > len(temperatures):
        raise ValueError(
            f"confidences of {num_slots} draft positions, but only {len(temperatures)} were calibrated: calibrate on "
            "traces of as many draft tokens"
        )
    return _scaled(confidence, temperatures[:num_slots])


def _scaled(confidence: Floats, temperature: Floats) -> Floats:
    """sigmoid(logit(confidence) / temperature)."""
    kept = np.clip(confidence, SATURATED, 1 - SATURATED)
    logits = np.log(kept) - np.log1p(-kept)
    return 1 / (1 + np.exp(-logits / temperature))


def calibration_error(predicted: Floats, outcomes: NDArray[np.bool_], *, num_bins: int) -> float:
    """Sum over equal bins of [0, 1] of (share of rounds) x |mean prediction - share of outcomes|; both [N]."""
    return float(_errors(_bin_sums(predicted, outcomes, num_bins)[None])[0])


def judge(
    rounds: Rounds, temperatures: Floats, *, num_fit_rounds: Sequence[int], num_bins: int, seed: int
) -> tuple[Position, ...]:
    """Every position's survivals before and after, on ``rounds`` that no temperature was fitted on."""
    before = np.cumprod(rounds.confidence, axis=1)
    after = np.cumprod(apply_temperatures(rounds.confidence, temperatures), axis=1)
    positions = []
    for slot, temperature in enumerate(temperatures):
        here = ~np.isnan(rounds.confidence[:, slot])
        qualities = [
            _quality(survival[here, slot], rounds.outcomes(slot)[here], rounds.prompt[here], num_bins, seed)
            for survival in (before, after)
        ]
        positions.append(
            Position(slot + 1, float(temperature), num_fit_rounds[slot], int(here.sum()), qualities[0], qualities[1])
        )
    return tuple(positions)


def reliability(rounds: Rounds, slot: int, *, num_bins: int) -> tuple[Bin, ...]:
    """The bars of one slot's diagram, as drafted."""
    here = ~np.isnan(rounds.confidence[:, slot])
    survival = np.prod(rounds.confidence[here, : slot + 1], axis=1)
    return _bars(_bin_sums(survival, rounds.outcomes(slot)[here], num_bins), num_bins)


def save_calibration(path: Path, positions: Sequence[Position], *, setting: Mapping[str, Any]) -> None:
    record = {"temperatures": [position.temperature for position in positions], "setting": dict(setting)}
    record["positions"] = [asdict(position) for position in positions]
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_temperatures(path: Path, source: ConfidenceSource = "head") -> Floats:
    """[K] of a ``calibration.json``, for ``apply_temperatures``.

    Raises:
        ValueError: no such file, or one of confidences of another source.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: add calibrate to stages")
    found = json.loads(path.read_text(encoding="utf-8"))
    calibrated = found.get("setting", {}).get("confidence", "head")
    if calibrated != source:
        raise ValueError(
            f"{path} calibrates scheduler.confidence={calibrated}, this run has scheduler.confidence={source}: do "
            "stages=calibrate again"
        )
    return np.array(found["temperatures"])


def read_bins(path: Path) -> list[tuple[tuple[Bin, ...], tuple[Bin, ...]]]:
    """(before, after) of each draft position of a ``calibration.json``; [] without the file."""
    if not path.is_file():
        return []
    positions = json.loads(path.read_text(encoding="utf-8"))["positions"]
    return [
        (
            tuple(Bin(**entry) for entry in position["before"]["bins"]),
            tuple(Bin(**entry) for entry in position["after"]["bins"]),
        )
        for position in positions
    ]


def _quality(
    survival: Floats, outcomes: NDArray[np.bool_], prompt: NDArray[np.int64], num_bins: int, seed: int
) -> Quality:
    names = np.unique(prompt)
    sums = np.stack([_bin_sums(survival[prompt == name], outcomes[prompt == name], num_bins) for name in names])
    ece, low, high = bootstrap_sums(sums, _errors, seed=seed)
    squares = np.array([((survival - outcomes)[prompt == name] ** 2).sum() for name in names])
    counts = np.array([(prompt == name).sum() for name in names])
    brier = bootstrap_ratios(squares[:, None], counts[:, None], seed=seed)
    auroc = None
    if 0 < outcomes.sum() < len(outcomes):
        auroc = float(binary_auroc(torch.from_numpy(survival), torch.from_numpy(outcomes.astype(np.int64))))
    return Quality(
        ece=ece,
        ece_low=max(low, 0.0),
        ece_high=high,
        ece_floor=_floor(survival, num_bins),
        brier=float(brier.value[0]),
        brier_low=float(brier.low[0]),
        brier_high=float(brier.high[0]),
        auroc=auroc,
        bins=_bars(sums.sum(0), num_bins),
    )


def _bars(sums: Floats, num_bins: int) -> tuple[Bin, ...]:
    return tuple(
        Bin(int(count), predicted / count, accepted / count)
        for count, predicted, accepted in sums.reshape(3, num_bins).T
        if count
    )


def _bin_sums(predicted: Floats, outcomes: NDArray[np.bool_], num_bins: int) -> Floats:
    """Rounds, predictions and outcomes summed per bin, one after the other: [3 * num_bins]."""
    where = _bins(predicted, num_bins)
    values = (np.ones_like(predicted), predicted, outcomes.astype(np.float64))
    return np.concatenate([np.bincount(where, each, num_bins).astype(np.float64) for each in values])


def _bins(predicted: Floats, num_bins: int) -> NDArray[np.int64]:
    return np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)


def _errors(sums: Floats) -> Floats:
    """Expected calibration errors [N] of N sums [N, 3 * num_bins]."""
    counts, predicted, accepted = np.split(sums, 3, axis=1)
    return np.abs(predicted - accepted).sum(1) / counts.sum(1)


def _floor(predicted: Floats, num_bins: int) -> float:
    """Mean error of outcomes drawn with the predicted probabilities (normal approximation in each bin)."""
    variances = np.bincount(_bins(predicted, num_bins), predicted * (1 - predicted), num_bins)
    return float(np.sqrt(2 / np.pi * variances).sum() / len(predicted))
