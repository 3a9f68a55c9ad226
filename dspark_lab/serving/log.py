"""What a simulation leaves: one row a step, one row an answered request."""

from dataclasses import dataclass, field

import numpy as np

from dspark_lab.hardware.protocol import Floats, Ints, StepShape
from dspark_lab.serving.workload import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Of S steps and Q answered requests. ``emitted`` counts the tokens after each request's first; ``first`` those.

    ``present`` are requests in the engine or waiting for it; ``largest`` is the largest step by each number.
    """

    duration_s: float
    width: int
    end_s: Floats  # [S]
    step_s: Floats
    num_requests: Ints
    num_prefill: Ints
    emitted: Ints
    first: Ints
    verified: Ints
    accepted: Ints
    present: Ints
    largest: StepShape
    asked_s: Floats  # [Q]
    first_s: Floats
    done_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints


@dataclass(slots=True)
class Recorder:
    """Collects rows; ``handed_over`` counts first tokens that came without a prefill here."""

    steps: list[tuple] = field(default_factory=list)
    requests: list[tuple] = field(default_factory=list)
    given: int = 0
    context: int = 0

    def handed_over(self, number: int) -> None:
        self.given += number

    def step(
        self,
        *,
        end_s: float,
        seconds: float,
        shape: StepShape,
        emitted: int,
        first: int,
        drafts: tuple[int, int],
        present: int,
    ) -> None:
        self.context = max(self.context, shape.num_context_tokens)
        row = (
            end_s,
            seconds,
            shape.num_requests,
            shape.num_prefill_tokens,
            emitted,
            first + self.given,
            *drafts,
            present,
        )
        self.steps.append(row)
        self.given = 0

    def request(self, request: Request, *, first_s: float, end_s: float) -> None:
        self.requests.append((request.asked_s, first_s, end_s, request.prompt_tokens, request.output_tokens))

    def log(self, *, duration_s: float, width: int) -> Log:
        steps = np.array(self.steps, float).reshape(-1, 9)
        counts = steps[:, 2:].astype(np.int64)
        requests = np.array(self.requests, float).reshape(-1, 5)
        tokens = counts[:, 0] + counts[:, 4] + counts[:, 1]
        largest = StepShape(int(counts[:, 0].max(initial=0)), int(tokens.max(initial=0)), 0, self.context)
        return Log(
            duration_s=duration_s,
            width=width,
            end_s=steps[:, 0],
            step_s=steps[:, 1],
            num_requests=counts[:, 0],
            num_prefill=counts[:, 1],
            emitted=counts[:, 2],
            first=counts[:, 3],
            verified=counts[:, 4],
            accepted=counts[:, 5],
            present=counts[:, 6],
            largest=largest,
            asked_s=requests[:, 0],
            first_s=requests[:, 1],
            done_s=requests[:, 2],
            prompt_tokens=requests[:, 3].astype(np.int64),
            output_tokens=requests[:, 4].astype(np.int64),
        )
