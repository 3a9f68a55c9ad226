"""The serve gate: does an engine accept of a drafter what this package's own decoding does? Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dspark_lab.evaluation.acceptance import acceptance_length, acceptance_rates, count_acceptance
from dspark_lab.evaluation.bootstrap import bootstrap_difference
from dspark_lab.records import Trace

TOLERANCE = 0.01
"""A difference below this share of our acceptance length is agreement, however narrow the interval."""

Pattern = Literal["zero", "first", "cliff", "tail", "higher"]

CAUSES: dict[Pattern, tuple[str, tuple[str, ...]]] = {
    "zero": (
        "the engine accepts next to nothing",
        (
            "other layers are captured (target.layer_ids against the exported ids, off by one, or in another order)",
            "the draft vocabulary's map (d2t) or the mask token is not the trained one",
            "weights that the engine did not load: names, or a target's embedding or head that it did not find",
        ),
    ),
    "first": (
        "the first draft token is already accepted less often",
        (
            "layer ids off by one",
            "the layout of the anchor (sample_from_anchor): the engine's slot k predicts another token",
            "a norm flag (norm_before_fc, fc_norm, norm_before_residual), or the final norm left out",
            "RoPE: base, scaling, or another origin of the positions",
            "the draft vocabulary, or a target in another precision",
        ),
    ),
    "cliff": (
        "the first draft token is accepted as often, the second much less",
        (
            "what is fed back between draft tokens: norm_output with EAGLE-3, the Markov head with DSpark",
            "the causal flag inside the block (sliding_window_non_causal, is_causal)",
            "the mask token id of the block's unknown slots",
        ),
    ),
    "tail": (
        "only later draft tokens are accepted less often",
        (
            "more draft tokens asked for than the block was trained with (num_speculative_tokens against block_size)",
            "a sliding window that the engine places elsewhere",
            "the causal flag inside the block",
        ),
    ),
    "higher": (
        "the engine accepts more than our own decoding",
        (
            "a mistake in propose, or other weights than the exported ones were evaluated",
            "another sampling or other prompts: the target is easier to predict there",
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Agreement:
    """``difference`` is the engine's acceptance length minus ours, with its 95 % interval over the same prompts."""

    ours: float
    served: float
    difference: float
    low: float
    high: float
    causes: tuple[str, ...]  # of a disagreement, the likeliest first

    @property
    def agrees(self) -> bool:
        return _within(self.ours, self.difference, self.low, self.high)

    def __str__(self) -> str:
        told = f"acceptance length {self.served:.3f} served, {self.ours:.3f} here"
        return f"{told}, difference {self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def compare(ours: Sequence[Trace], served: Sequence[Trace], *, seed: int, faults: Sequence[str] = ()) -> Agreement:
    """Both of the same prompts in the same order, at least two. ``faults`` of the engine go before other causes.

    Raises:
        ValueError: one of them has no verify step, so there is nothing to compare.
    """
    assert [trace.prompt_id for trace in ours] == [trace.prompt_id for trace in served]
    mine, theirs = count_acceptance(ours), count_acceptance(served)
    if not mine.steps.any() or not theirs.steps.any():
        raise ValueError("no answer is longer than one token, so nothing was drafted: choose other prompts")
    difference, low, high = bootstrap_difference(
        np.stack([theirs.accepted, mine.accepted], axis=1), np.stack([theirs.steps, mine.steps], axis=1), seed=seed
    )
    length = acceptance_length(ours)
    agrees = _within(length, difference, low, high)
    causes = ()
    if not agrees:
        causes = likely_causes(acceptance_rates(ours).tolist(), acceptance_rates(served).tolist(), faults)
    return Agreement(length, acceptance_length(served), difference, low, high, causes)


def likely_causes(ours: Sequence[float], served: Sequence[float], faults: Sequence[str] = ()) -> tuple[str, ...]:
    """What may be behind a disagreement, from the (unconditional) acceptance rates per position of both."""
    if len(ours) != len(served):
        return (
            f"the engine drafts {len(served)} tokens, {len(ours)} were drafted here: num_speculative_tokens differs",
        )
    told, causes = CAUSES[find_pattern(ours, served)]
    return (told, *faults, *causes)


def find_pattern(ours: Sequence[float], served: Sequence[float]) -> Pattern:
    """Where the rates part: at the first draft token, at the second, later; or all is lost, or gained."""
    if sum(served) >= sum(ours):
        return "higher"
    if sum(served) < 0.1 * sum(ours):
        return "zero"
    if served[0] < 0.93 * ours[0]:
        return "first"
    # Given the first token, so that a small loss there does not count twice.
    if len(ours) > 1 and _given_first(served) < 0.85 * _given_first(ours):
        return "cliff"
    return "tail"


def mismatches(ours: Sequence[Sequence[int]], served: Sequence[Sequence[int]]) -> list[int]:
    """Indices of the prompts whose token ids differ."""
    return [index for index, pair in enumerate(zip(ours, served, strict=True)) if tuple(pair[0]) != tuple(pair[1])]


def _given_first(rates: Sequence[Any]) -> float:
    return rates[1] / rates[0] if rates[0] else 0.0


def _within(ours: float, difference: float, low: float, high: float) -> bool:
    return low <= 0.0 <= high or abs(difference) <= TOLERANCE * ours
