"""Who asks the engine, when and how long."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt

from dspark_lab.validation import checked

Spread = Literal["constant", "exponential", "lognormal"]
SIGMA = 0.5  # of the lognormal's logarithm


@dataclass(frozen=True, slots=True)
class Request:
    """``output_tokens`` >= 1, the first of them from prefill. ``asked_s``: when the client sent it."""

    asked_s: float
    prompt_tokens: int
    output_tokens: int


class Workload:
    """Args:
    arrivals: *closed*: so many clients, each asking anew when it is answered; *poisson*: so many requests a second.
    prompt_tokens, output_tokens: means; ``spread`` is their distribution (lognormal: ``SIGMA``).
    client_gap_s: between an answer and the client's next request.
    frontend_s: between the client and the engine's queue; part of the time to the first token.
    """

    @checked
    def __init__(
        self,
        *,
        arrivals: Literal["closed", "poisson"],
        prompt_tokens: PositiveInt,
        output_tokens: PositiveInt,
        spread: Spread,
        client_gap_s: NonNegativeFloat,
        frontend_s: NonNegativeFloat,
    ) -> None:
        self.arrivals, self.spread = arrivals, spread
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens
        self.client_gap_s, self.frontend_s = client_gap_s, frontend_s

    def first_requests(self, load: float, *, until_s: float, generator: np.random.Generator) -> list[Request]:
        """What is asked before any answer: one request a client, or all requests of an open loop.

        A client's first request is cut to a random share, so that clients do not march in step.
        """
        if self.arrivals == "poisson":
            times = np.cumsum(generator.exponential(1 / load, int(load * until_s * 1.2) + 50))
            return [self.request(float(time), generator) for time in times[times < until_s]]
        shares = generator.random(int(load))
        return [
            Request(0.0, drawn.prompt_tokens, max(1, round(share * drawn.output_tokens)))
            for share, drawn in ((share, self.request(0.0, generator)) for share in shares)
        ]

    def next_request(self, answered_s: float, generator: np.random.Generator) -> Request | None:
        """What the client of an answered request asks next; None in an open loop."""
        return self.request(answered_s + self.client_gap_s, generator) if self.arrivals == "closed" else None

    def request(self, asked_s: float, generator: np.random.Generator) -> Request:
        prompt, output = (self._length(mean, generator) for mean in (self.prompt_tokens, self.output_tokens))
        return Request(asked_s, prompt, output)

    def _length(self, mean: int, generator: np.random.Generator) -> int:
        if self.spread == "constant":
            return mean
        if self.spread == "exponential":
            return max(1, round(generator.exponential(mean)))
        return max(1, round(generator.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA)))
