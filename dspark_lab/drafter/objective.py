"""What is minimised: terms, slot weights, labels, which slots count, and what the sum is divided by.

``conf/loss`` has the paper's choice and those of the two trainers that published drafters come from; every part can be
chosen alone. ``docs/algorithms.md`` compares them term by term.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dspark_lab.drafter.divergences import TERMS
from dspark_lab.validation import checked

Normalizer = Literal["global", "speculators", "deepspec"]
Supervision = Literal["drafted", "speculators", "deepspec"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of one algorithm: sum over slots and terms of weight(slot) * terms[name] * term.

    ``weighting`` of slot (EAGLE-3: step) k with its number ``decay``: *exponential* exp(-k / decay), *geometric* decay^k,
    *dpace* sum_(j >= k) prod_(i <= j) ((1 - decay) q_i + decay), q_i the probability of slot i's label (arXiv 2605.18810).
    ``labels`` of ``ce``: the *data*'s token, or the *target*'s arg-max on the draft vocabulary. ``outside``: *mask* takes
    no loss from a slot whose target arg-max lies outside the draft vocabulary (EAGLE), *keep* does.
    """

    terms: Mapping[str, float]
    weighting: Literal["exponential", "geometric", "dpace"]
    decay: float
    labels: Literal["data", "target"]
    outside: Literal["keep", "mask"]

    def __post_init__(self) -> None:
        low, high = {"exponential": (0.0, float("inf")), "geometric": (0.0, 1.0), "dpace": (0.0, 1.0)}[self.weighting]
        if not low < self.decay <= high:
            raise ValueError(
                f"decay={self.decay} for weighting={self.weighting}: must lie in ({low:g}, {high:g}]; exponential takes a "
                "number of slots (4.0), geometric a ratio (0.8), dpace the smoothing of the probabilities (0.5)"
            )
        if not any(self.terms.values()):
            raise ValueError(f"terms={dict(self.terms)}: give at least one a weight; there are {', '.join(TERMS)}")
        if self.weighting == "dpace" and "ce" not in self.active:
            raise ValueError("weighting=dpace weighs by the labels' probabilities: give terms.ce a weight")

    @property
    def active(self) -> dict[str, float]:
        """The terms with a weight."""
        return {name: weight for name, weight in self.terms.items() if weight}

    def check_terms(self, algorithm: str, own: frozenset[str]) -> None:
        """Refuse a term that ``algorithm`` does not have. ``own`` are its terms beside ``TERMS``."""
        unknown = [name for name in self.active if name not in own and name not in TERMS]
        if unknown:
            raise ValueError(
                f"loss.{algorithm}.terms.{unknown[0]}={self.terms[unknown[0]]}: this {algorithm} has no such term (there "
                f"are {', '.join((*TERMS, *sorted(own)))}); set it to 0 or switch its head on"
            )

    def decays(self, num_slots: int) -> Tensor:
        """[S]: the part of the weights that is known beforehand; ones for D-PACE."""
        if self.weighting == "dpace":
            return torch.ones(num_slots)
        slots = torch.arange(num_slots)
        return torch.exp(-slots / self.decay) if self.weighting == "exponential" else self.decay ** slots.float()

    def slot_weights(self, decays: Tensor, supervised: Tensor, label_probability: Tensor) -> Tensor:
        """[A, S] weights of a chunk of whole blocks; 0 where nothing is supervised."""
        if self.weighting == "dpace":
            return dpace(label_probability, supervised, floor=self.decay)
        return decays * supervised

    def divergences(self, own: frozenset[str]) -> dict[str, float]:
        """The active terms that are divergences of q from p, not the drafter's ``own``."""
        return {name: weight for name, weight in self.active.items() if name not in own}


class Loss:
    """``conf/loss``: an ``Objective`` for each algorithm, and the two conventions they share.

    ``supervision``: which slots count (``docs/algorithms.md``); *drafted* are those that decoding really drafts.
    ``normalizer``: *global* divides the sums of all micro-batches and ranks of an optimizer step by one common weight;
    *speculators* and *deepspec* divide each row batch as these trainers do, and want one rank and no accumulation.
    """

    @checked
    def __init__(
        self,
        *,
        normalizer: Normalizer,
        supervision: Supervision,
        eagle3: Objective,
        dflash: Objective,
        dspark: Objective,
        other: Objective,
    ) -> None:
        self.normalizer: Normalizer = normalizer
        self.supervision: Supervision = supervision
        self._objectives = {"eagle3": eagle3, "dflash": dflash, "dspark": dspark}
        self._other = other

    def objective_of(self, algorithm: type) -> Objective:
        """By the class or the nearest base that has a key here; ``other`` for the rest."""
        names = (base.__name__.lower() for base in algorithm.__mro__)
        return next((self._objectives[name] for name in names if name in self._objectives), self._other)

    def check_batches(self, *, world_size: int, accumulate: int) -> None:
        """Refuse a trainer in which the peers' normalizers would mean something else."""
        if self.normalizer != "global" and (world_size > 1 or accumulate > 1):
            raise ValueError(
                f"loss.normalizer={self.normalizer} divides each batch by itself; with {world_size} ranks and "
                f"trainer.accumulate={accumulate} the result would depend on them: use loss.normalizer=global"
            )


def dpace(probability: Tensor, supervised: Tensor, *, floor: float) -> Tensor:
    """D-PACE weights [A, S] from the labels' probabilities [A, S] (algorithms.md 3.6)."""
    smooth = (1.0 - floor) * probability + floor
    prefix = smooth.where(supervised, torch.ones_like(smooth)).cumprod(-1) * supervised
    return prefix.flip(-1).cumsum(-1).flip(-1) * supervised


def normalisation(
    normalizer: Normalizer, decays: Tensor, supervised: Tensor, *, chained: bool, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """(factor of each slot's weight [S] or [], denominator []).

    ``decays`` [S], ones for D-PACE; ``supervised`` [A, S]; ``chained``: slots are steps of a chain, each of which is a loss
    of its own for the peers; ``num_tokens`` of the batch, padding included. With a peer's normalizer the denominator is
    1 and the division is in the factor.
    """
    one = decays.new_ones(())
    counts = supervised.sum(0)
    if normalizer == "global":
        return one, (decays * counts).sum()
    if normalizer == "speculators":
        return 1.0 / ((counts if chained else counts.sum()) + 1e-5), one
    return 1.0 / (one * num_tokens if chained else (decays * counts).sum() + 1e-6), one
