"""What each scheduler makes of a published cost curve, load by load. Simulated: expected tokens per second, not measured.

    python experiments/scheduler/lengths.py

Requests differ and keep their character for about 40 steps; confidences are exactly right. The acceptance length of whole
blocks is about 4.0 (with one or four requests, few are drawn: 4.9 and 4.1 there).
"""

import numpy as np
from curves import V4_FLASH

from dspark_lab.scheduler.budget import StepCosts
from dspark_lab.scheduler.hardware_aware import HardwareAware
from dspark_lab.scheduler.oracle import Oracle
from dspark_lab.scheduler.protocol import Load

NUM_SLOTS, NUM_STEPS, LOADS = 7, 400, (1, 4, 16, 64, 128, 256)


def schedulers() -> dict:
    aware = {
        "early stop, measured costs": ("early_stop", "measured"),
        "early stop, convex costs": ("early_stop", "convex"),
        "global budget": ("global_budget", "measured"),
    }
    made = {
        name: HardwareAware(hardware=V4_FLASH, mode=mode, staleness=2, cost_curve=curve, confidence="head")  # pyright: ignore[reportArgumentType]
        for name, (mode, curve) in aware.items()
    }
    return {**made, "oracle": Oracle(hardware=V4_FLASH)}


def rates(num_requests: int) -> dict[str, tuple[float, float]]:
    """Tokens per second and verified draft tokens per request, by scheduler."""
    generator = np.random.default_rng(num_requests)
    level, ids, last = generator.beta(5, 1.6, (num_requests, 1)), np.arange(num_requests), num_requests
    costs = StepCosts(V4_FLASH)(Load(num_requests), num_draft_tokens=NUM_SLOTS)
    made, totals = schedulers(), {}
    for _ in range(NUM_STEPS):
        for row in np.flatnonzero(generator.random(num_requests) < 1 / 40):
            level[row], ids[row], last = generator.beta(5, 1.6), last, last + 1
        confidence = np.clip(level + 0.1 * generator.standard_normal((num_requests, NUM_SLOTS)), 0.02, 0.98)
        truth = (generator.random(confidence.shape) < confidence).astype(float)
        load = Load(num_requests, request_ids=ids)
        lengths = {
            name: scheduler.draft_lengths(
                truth if scheduler.confidence == "acceptance" else confidence, load, num_draft_tokens=NUM_SLOTS
            )
            for name, scheduler in made.items()
        }
        lengths |= {f"{k}": np.full(num_requests, k) for k in range(NUM_SLOTS + 1)}
        accepted = np.cumprod(truth, axis=1)
        for name, found in lengths.items():
            tokens = num_requests + accepted[np.arange(NUM_SLOTS) < found[:, None]].sum()
            totals.setdefault(name, np.zeros(3))
            totals[name] += (tokens, costs[found.sum()], found.sum())
    return {name: (total[0] / total[1], total[2] / NUM_STEPS / num_requests) for name, total in totals.items()}


def main() -> None:
    by_load = {load: rates(load) for load in LOADS}
    fixed = [f"{k}" for k in range(NUM_SLOTS + 1)]
    # One length for all loads: the one that loses least, summed over the loads.
    best = {load: max(fixed, key=lambda k, load=load: by_load[load][k][0]) for load in LOADS}
    one = max(fixed, key=lambda k: sum(np.log(by_load[load][k][0]) for load in LOADS))
    print(f"tokens/s (verified per request); one fixed length for all loads: {one}")
    names = [name for name in by_load[1] if name not in fixed]
    print("| requests | best fixed | one fixed | " + " | ".join(names) + " | budget over best | over one |")
    print("|---" * (len(names) + 5) + "|")
    for load, found in by_load.items():
        cells = [f"{found[best[load]][0]:,.0f} ({best[load]})", f"{found[one][0]:,.0f}"]
        cells += [f"{found[name][0]:,.0f} ({found[name][1]:.1f})" for name in names]
        budget = found["global budget"][0]
        cells += [f"{100 * (budget / found[best[load]][0] - 1):+.1f} %", f"{100 * (budget / found[one][0] - 1):+.1f} %"]
        print(f"| {load} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
