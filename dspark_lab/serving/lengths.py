"""What a scheduler gains over fixed lengths, said twice: over the best one of each load, and over one for all loads.

The first is what the scheduler adds for somebody who knows the load and sets the length by it; the second is larger, and
much of it is what setting the length by the load would gain as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Place = tuple[float, int]
"""Load and number of GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGain:
    """Rates of a scheme, of the best fixed length and of the one length for all loads, at one load; 0: no drafter."""

    scheme: str
    load: float
    num_gpus: int
    rate: float
    best_length: int
    best_rate: float
    one_length: int
    one_rate: float

    @property
    def over_best(self) -> float:
        return self.rate / self.best_rate

    @property
    def over_one(self) -> float:
        return self.rate / self.one_rate


def against_lengths(
    scheme: str, rates: Mapping[Place, float], lengths: Mapping[int, Mapping[Place, float]]
) -> tuple[LoadGain, ...]:
    """At each place of ``rates``, whose order it has. The one length has the best product of its rates over all of them.

    Lengths that lack a place are left out; without any nothing is told.
    """
    known = {length: found for length, found in lengths.items() if rates and rates.keys() <= found.keys()}
    if not known:
        return ()
    one = max(known, key=lambda length: float(np.sum(np.log([known[length][place] for place in rates]))))
    gains = []
    for place, rate in rates.items():
        best = max(known, key=lambda length, place=place: known[length][place])
        gains.append(
            LoadGain(
                scheme=scheme,
                load=place[0],
                num_gpus=place[1],
                rate=rate,
                best_length=best,
                best_rate=known[best][place],
                one_length=one,
                one_rate=known[one][place],
            )
        )
    return tuple(gains)
