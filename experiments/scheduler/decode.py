"""A scheduler's effect on real decoding, and what the simulator says of it beforehand: batches of 1 to 16 in this process.

    python experiments/scheduler/decode.py RUN --batches 1 4 16 +experiment=demo drafter=dspark

RUN is a folder that `python -m dspark_lab` trained, evaluated and calibrated with the overrides given here. Step times are
measured first (verify over requests and tokens, draft over requests) and fitted as `stages=profile` fits them. All ways of
decoding then take turns, round after round, on the benchmark's prompts. *Predicted* is the simulator with those step times
and the rounds that replay of the same prompts had, in the same batches: its requests come together and none joins.
Seconds are CPU seconds of this process, which other programs on the machine change little: run it with one thread.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from rich.progress import track

from dspark_lab.configs import config_folder
from dspark_lab.drafter.context import DraftContext
from dspark_lab.evaluation.batch import PLAIN, Way, evaluate_batches
from dspark_lab.evaluation.calibration import read_temperatures
from dspark_lab.evaluation.decode import prompt_only
from dspark_lab.evaluation.traces import read_traces
from dspark_lab.hardware.table import Measurement, TableProfile, TimedDraft, TimedStep
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.train import trained
from dspark_lab.records import Sampling
from dspark_lab.report.results import RunInfo
from dspark_lab.run import Run
from dspark_lab.scheduler.calibrated import Calibrated
from dspark_lab.scheduler.fixed import Fixed
from dspark_lab.scheduler.hardware_aware import HardwareAware
from dspark_lab.serving.acceptance import from_traces
from dspark_lab.serving.simulator import Limits, simulate
from dspark_lab.serving.workload import Request
from dspark_lab.training.place import Place


@dataclass(frozen=True)
class Batch:
    """A workload of the simulator: these requests at once, and no others."""

    requests: list[Request]
    frontend_s: float = 0.0

    def first_requests(self, load: float, *, until_s: float, generator: np.random.Generator) -> list[Request]:
        return self.requests

    def next_request(self, answered_s: float, generator: np.random.Generator) -> Request | None:
        return None


def median_s(action, *, repeats: int) -> float:
    taken = []
    for _ in range(repeats + 1):
        start = time.process_time()
        action()
        taken.append(time.process_time() - start)
    return float(np.median(taken[1:]))


@torch.inference_mode()
def measure(target, drafter, prompt: torch.Tensor, batches: list[int]) -> TableProfile:
    """Times of steps on caches of the prompt's length, the prompt's own prefill among them."""
    steps, drafts = [], []
    for num_requests in track(batches, "step times"):
        prompts = prompt.repeat(num_requests, 1)
        for width in (len(prompt), 1, 2, 3, 5, 9):
            verifier = target.batch_verifier()
            lengths = torch.full((num_requests,), len(prompt))
            states = verifier.forward(prompts, lengths).hidden_states[0]
            verifier.keep(lengths)
            ids, fed = prompts[:, :width], torch.full((num_requests,), width)

            def step(verifier=verifier, ids=ids, fed=fed) -> None:
                verifier.forward(ids, fed)
                verifier.keep(torch.ones_like(fed))  # a step keeps at least the anchor

            time_s = median_s(step, repeats=5 if width < len(prompt) else 2)
            context = num_requests * len(prompt)
            steps.append(TimedStep(num_requests=num_requests, num_tokens=num_requests * width,
                                   num_context_tokens=context, time_s=time_s))  # fmt: skip
        contexts = [DraftContext.start(prompt, states, 5) for _ in range(num_requests)]

        def propose(contexts=contexts, states=states) -> None:
            drafter.propose(contexts, num_draft_tokens=drafter.num_draft_tokens, sampling=Sampling())
            for context in contexts:
                context.advance(prompt[-2:], states[-2:], 5)

        drafts.append(TimedDraft(num_requests=num_requests, time_s=median_s(propose, repeats=3)))
    measured = Measurement(name="here", target="here", num_gpus=1, steps=tuple(steps), drafts=tuple(drafts))
    profile = TableProfile.fit(measured)
    print(f"step times fitted within {profile.mape:.1%}; " + ", ".join(
        f"{point.num_requests} requests {1000 * point.time_s:.0f} ms a draft" for point in drafts))  # fmt: skip
    return profile


def predicted_rate(profile, make_scheduler, acceptance, groups, outputs: list[int]) -> float:
    """Tokens per second of the groups of prompts, each answered with as many tokens as it really was."""
    seconds, lengths = 0.0, iter(outputs)
    for number, group in enumerate(groups):
        requests = [Request(0.0, len(prompt.token_ids), next(lengths)) for prompt in group]
        workload: Any = Batch(requests)
        log = simulate(
            profile=profile, acceptance=acceptance, scheduler=make_scheduler(), workload=workload, load=len(group),
            limits=Limits(num_requests=len(group), batch_tokens=10**6), room=None, duration_s=10**6, seed=number,
        )  # fmt: skip
        seconds += float(log.end_s[-1])
    return sum(outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--timed", type=int, nargs="+", help="batches whose steps are timed; without it --batches")
    parser.add_argument("--prompts", type=int, default=16, help="per way of decoding, and at least one batch")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    options, overrides = parser.parse_known_args()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", overrides)
    info = RunInfo(options.run.name, {"engine": "huggingface", "store": "disk", "cluster": "attach"}, {}, "", "")
    parts = Parts(config, Run(options.run.name, options.run, ""), info, Place.of())
    drafter, _ = trained(parts)
    prompts = [prompt_only(conversation) for conversation in parts.conversations.tokenized["evaluation"]]
    longest = max((prompt.token_ids for prompt in prompts), key=len)
    profile = measure(parts.target, drafter, longest, options.timed or options.batches)
    replayed = {trace.prompt_id: trace for trace in read_traces(parts.run.traces, origin="replayed")}
    temperatures = read_temperatures(parts.run.calibration)

    def aware(mode) -> Calibrated:
        return Calibrated(
            HardwareAware(hardware=profile, mode=mode, staleness=2, cost_curve="convex", confidence="head"),
            temperatures,
        )

    lengths = {f"fixed {k}": lambda k=k: Fixed(num_verified_tokens=k) for k in (1, 2, drafter.num_draft_tokens)}
    aware_of = {"early stop": lambda: aware("early_stop"), "global budget": lambda: aware("global_budget")}
    ways = {"plain": PLAIN, **{name: Way(name, drafter, make) for name, make in {**lengths, **aware_of}.items()}}
    header = ("batch", "way", "tokens/s", "predicted", "error", "over plain", "tokens/step", "verified drafts/step")
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    for size in options.batches:
        chosen = prompts[: max(options.prompts if size > 1 else 4, size)]
        told = [replayed[prompt.id] for prompt in chosen]
        table = from_traces(told, name="replay", origin="replayed", num_draft_tokens=drafter.num_draft_tokens)
        found = evaluate_batches(
            parts.in_process.batch_verifier,
            list(ways.values()),
            chosen,
            batch_size=size,
            sampling=Sampling(max_new_tokens=options.tokens),
            num_draft_tokens=drafter.num_draft_tokens,
            eos_token_ids=parts.target.spec.eos_token_ids,
            seed=0,
            num_rounds=options.rounds,
            clock=time.process_time,
        )
        for name, result in found.items():
            drafts = ways[name].drafter is not None
            expected = predicted_rate(
                profile,
                ways[name].scheduler if drafts else lambda: None,
                table if drafts else None,
                [chosen[start : start + size] for start in range(0, len(chosen), size)],
                [len(text) for text in result.token_ids],
            )
            rate = float(np.median(result.rates))
            cells = (
                size,
                name + ("" if result.token_ids == found["plain"].token_ids else " (other text)"),
                f"{rate:.2f}",
                f"{expected:.2f}",
                f"{expected / rate - 1:+.0%}",
                f"{np.median(result.rates / found['plain'].rates):.2f}",
                f"{result.acceptance_length:.2f}",
                f"{result.num_verified:.2f}",
            )
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
