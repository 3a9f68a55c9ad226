"""How long does a decision take, and what beside it: a plain sort, and the engine's formula written plainly.

    python experiments/scheduler/decision.py --requests 256 --slots 8

One thread. Confidences change in every decision; the load is the same, as between two steps of a full engine.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from dspark_lab.hardware.protocol import StepShape
from dspark_lab.scheduler.fixed import Fixed
from dspark_lab.scheduler.hardware_aware import HardwareAware
from dspark_lab.scheduler.oracle import Oracle
from dspark_lab.scheduler.protocol import Load, VerifyScheduler
from dspark_lab.scheduler.threshold import Threshold


class Line:
    """Seconds that grow by a line."""

    def verify_time_s(self, shape: StepShape):
        return 0.005 + 1e-5 * np.asarray(shape.num_verify_tokens)

    def draft_time_s(self, *, num_requests: int, num_context_tokens: int = 0) -> float:
        return 0.001


def engine_formula(survival: np.ndarray, known: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """argmax (R + sum of the B largest) / (draft + verify(R + B)), then the B largest by a stable sort of all."""
    num_requests = len(survival)
    gains = np.cumsum(np.sort(known, axis=None)[::-1])
    budget = int(np.argmax(np.concatenate([[num_requests], num_requests + gains]) / costs))
    order = np.argsort(-survival.T.ravel(), kind="stable")[:budget]
    return np.bincount(order % num_requests, minlength=num_requests)


def microseconds(decide: Callable[[int], object], *, repeats: int) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile over ``repeats`` calls."""
    taken = []
    for repeat in range(repeats + 50):
        start = time.perf_counter()
        decide(repeat)
        taken.append((time.perf_counter() - start) * 1e6)
    low, median, high = np.quantile(taken[50:], [0.1, 0.5, 0.9])
    return float(median), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2000)
    options = parser.parse_args()
    num_requests, num_slots = options.requests, options.slots
    generator = np.random.default_rng(0)
    steps = [generator.beta(5, 1.6, (num_requests, num_slots)) for _ in range(16)]
    survivals = [np.cumprod(step, axis=1) for step in steps]
    load = Load(num_requests, num_context_tokens=2048 * num_requests, request_ids=np.arange(num_requests))
    hardware = Line()
    costs = 0.006 + 1e-5 * (num_requests + np.arange(num_requests * num_slots + 1))

    def under(scheduler: VerifyScheduler) -> Callable[[int], object]:
        return lambda step: scheduler.draft_lengths(steps[step % 16], load, num_draft_tokens=num_slots)

    def aware(mode) -> HardwareAware:
        return HardwareAware(hardware=hardware, mode=mode, staleness=2, cost_curve="convex", confidence="head")

    changing = aware("global_budget")
    loads = [Load(num_requests, 0, 2048 * num_requests, np.arange(first, first + num_requests)) for first in range(16)]

    def other_requests(step: int) -> object:
        return changing.draft_lengths(steps[step % 16], loads[step % 16], num_draft_tokens=num_slots)

    measured = {
        "running products and a plain sort (np.sort)": lambda step: np.sort(np.cumprod(steps[step % 16], 1), axis=None),
        "running products and a stable argsort": lambda step: np.argsort(
            -np.cumprod(steps[step % 16], 1), axis=None, kind="stable"
        ),
        "the engine's formula, written plainly": lambda step: engine_formula(
            np.cumprod(steps[step % 16], 1), survivals[(step - 2) % 16], costs
        ),
        "fixed": under(Fixed(num_verified_tokens=3)),
        "threshold": under(Threshold(survival=0.3, confidence="head")),
        "hardware_aware, early_stop": under(aware("early_stop")),
        "hardware_aware, global_budget": under(aware("global_budget")),
        "hardware_aware, global_budget, a request ends in every step": other_requests,
        "oracle": under(Oracle(hardware=hardware)),
    }
    print(
        f"| {num_requests} requests x {num_slots} slots | median, microseconds | 10th to 90th percentile |\n|---|---|---|"
    )
    for name, decide in measured.items():
        median, low, high = microseconds(decide, repeats=options.repeats)
        print(f"| {name} | {median:.0f} | {low:.0f} to {high:.0f} |")


if __name__ == "__main__":
    main()
