"""Does torch.compile help a drafter's network (forward and backward up to the states, without the vocabulary)?

python experiments/training_step/compiled.py --row 2048 --anchors 256
"""

import argparse
import time
import warnings
from collections.abc import Callable

import torch
from benchmark import DEVICE, DRAFTERS, SMALL, Shape, batch_of, drafter_of

from dspark_lab.drafter.base import DraftOutput


def best_cpu_s(forward: Callable[..., DraftOutput], batch: object, *, rounds: int) -> float:
    """CPU seconds of the quickest of ``rounds`` passes after a first one, which compiles."""
    times = []
    for _ in range(rounds + 1):
        started = time.process_time()
        forward(batch).hidden.sum().backward()
        times.append(time.process_time() - started)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, default=2048)
    parser.add_argument("--anchors", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of graph breaks: attention slices its context by data
    shape = Shape(**SMALL, row=arguments.row, anchors=arguments.anchors, draft_vocabulary=8192)
    print("| drafter | eager, CPU s | compiled, CPU s | first compiled pass, s |\n|---|--:|--:|--:|")
    for name in DRAFTERS:
        drafter, batch = drafter_of(name, shape, chunk=256).to(DEVICE), batch_of(shape)
        eager = best_cpu_s(drafter.forward, batch, rounds=arguments.rounds)
        compiled = torch.compile(drafter.forward, dynamic=True)
        started = time.perf_counter()
        compiled(batch).hidden.sum().backward()
        first = time.perf_counter() - started
        ours = best_cpu_s(compiled, batch, rounds=arguments.rounds)
        print(f"| {name} | {eager:.2f} | {ours:.2f} | {first:.0f} |", flush=True)


if __name__ == "__main__":
    main()
