"""Hand-made profiles, schedulers and workloads, for tests of the simulator."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark_lab.hardware.protocol import Floats, Ints, StepShape
from dspark_lab.records import ConfidenceSource
from dspark_lab.scheduler.protocol import Load
from dspark_lab.serving.acceptance import AcceptanceTable, synthesize
from dspark_lab.serving.log import Log
from dspark_lab.serving.simulator import Limits, simulate
from dspark_lab.serving.workload import Workload


@dataclass(frozen=True)
class Linear:
    """``fixed_s`` + ``token_s`` a token; drafts cost ``draft_s``."""

    fixed_s: float = 0.01
    token_s: float = 0.0
    draft_s: float = 0.0

    def verify_time_s(self, shape: StepShape) -> Floats:
        return self.fixed_s + self.token_s * (np.asarray(shape.num_verify_tokens, float) + shape.num_prefill_tokens)

    def draft_time_s(self, *, num_requests: int, num_context_tokens: int = 0) -> float:
        return self.draft_s


@dataclass(frozen=True)
class FixedLength:
    length: int
    confidence: ConfidenceSource | None = None

    def draft_lengths(self, confidence: Floats | None, load: Load, *, num_draft_tokens: int) -> Ints:
        return np.full(load.num_requests, self.length)


def accepting(length: float, width: int = 7, **changes: Any) -> AcceptanceTable:
    """Rounds with this acceptance length."""
    facts = {"concentration": None, "confidence_noise": 0.0, "confidence_shift": 0.0, "num_requests": 50, "seed": 0}
    return synthesize({"all": length}, name="test", num_draft_tokens=width, **{**facts, **changes})


def workload(**changes: Any) -> Workload:
    facts = {
        "arrivals": "closed",
        "prompt_tokens": 1,
        "output_tokens": 200,
        "spread": "constant",
        "client_gap_s": 0.0,
        "frontend_s": 0.0,
    }
    return Workload(**{**facts, **changes})


def run(**changes: Any) -> Log:
    facts = {
        "profile": Linear(),
        "acceptance": None,
        "scheduler": None,
        "workload": workload(),
        "load": 8,
        "limits": Limits(num_requests=256, batch_tokens=8192),
        "room": None,
        "duration_s": 60.0,
        "seed": 0,
    }
    return simulate(**{**facts, **changes})
