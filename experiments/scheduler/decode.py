"""A scheduler's effect on real decoding: one target, one drafter, batches of 1 to 16 in this process.

    python experiments/scheduler/decode.py RUN --batches 1 4 16 +experiment=demo drafter=dspark

RUN is a folder that `python -m dspark_lab` trained with the overrides given here. Step times are measured first (verify over
requests and tokens, draft over requests) and fitted by a plane; all ways of decoding then take turns, round after round.
Seconds are CPU seconds of this process, which other programs on the machine change little: run it with one thread.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from rich.progress import track

from dspark_lab.__main__ import config_folder
from dspark_lab.decoding.batch import decode_batch
from dspark_lab.drafter.context import DraftContext
from dspark_lab.evaluation.calibration import read_temperatures
from dspark_lab.evaluation.decode import prompt_only
from dspark_lab.hardware.protocol import StepShape
from dspark_lab.pipeline.parts import Parts
from dspark_lab.pipeline.train import trained
from dspark_lab.records import Sampling
from dspark_lab.report.results import RunInfo
from dspark_lab.run import Run
from dspark_lab.scheduler.calibrated import Calibrated
from dspark_lab.scheduler.fixed import Fixed, NoDrafts
from dspark_lab.scheduler.hardware_aware import HardwareAware
from dspark_lab.training.place import Place


class Plane:
    """Seconds that grow by requests and by tokens."""

    def __init__(self, verify: np.ndarray, draft: np.ndarray) -> None:
        self.verify, self.draft = verify, draft

    def verify_time_s(self, shape: StepShape):
        start, per_request, per_token = self.verify
        return start + per_request * shape.num_requests + per_token * np.asarray(shape.num_verify_tokens)

    def draft_time_s(self, *, num_requests: int, num_context_tokens: int = 0) -> float:
        return float(self.draft[0] + self.draft[1] * num_requests)


def median_s(action, *, repeats: int) -> float:
    taken = []
    for _ in range(repeats + 1):
        start = time.process_time()
        action()
        taken.append(time.process_time() - start)
    return float(np.median(taken[1:]))


@torch.inference_mode()
def measure(target, drafter, prompt: torch.Tensor, batches: list[int]) -> Plane:
    """Times of steps on caches of the prompt's length."""
    verify, draft = [], []
    for num_requests in track(batches, "step times"):
        verifier = target.batch_verifier()
        prompts = prompt.repeat(num_requests, 1)
        states = verifier.forward(prompts, torch.full((num_requests,), len(prompt))).hidden_states[0]
        for width in (1, 2, 3, 5, 9):
            ids, lengths = prompts[:, :width], torch.full((num_requests,), width)

            def step(verifier=verifier, ids=ids, lengths=lengths) -> None:
                verifier.forward(ids, lengths)
                verifier.keep(torch.ones_like(lengths))  # a step keeps at least the anchor

            verify.append((1, num_requests, num_requests * width, median_s(step, repeats=5)))
        context = DraftContext.start(prompt, states, 5)

        def propose(context=context, num_requests=num_requests) -> None:
            for _ in range(num_requests):
                drafter.propose(context, num_draft_tokens=drafter.num_draft_tokens, sampling=Sampling())

        draft.append((1, num_requests, median_s(propose, repeats=3)))
    fits = []
    for name, points in (("verify", np.array(verify)), ("draft", np.array(draft))):
        # Relative errors count alike, whatever the batch.
        weights = 1 / points[:, -1:]
        fit = np.linalg.lstsq(points[:, :-1] * weights, np.ones(len(points)), rcond=None)[0].clip(min=0)
        error = np.abs(points[:, :-1] @ fit / points[:, -1] - 1)
        shown = f"{np.round(fit * 1000, 1)} ms (start, per request, per token)"
        print(f"{name}: {shown}; error {error.mean():.1%}, at most {error.max():.1%}")
        fits.append(fit)
    return Plane(*fits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=16, help="per way of decoding, and at least one batch")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    options, overrides = parser.parse_known_args()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", overrides)
    info = RunInfo(options.run.name, {"engine": "huggingface", "store": "disk", "cluster": "attach"}, {}, "", "")
    parts = Parts(config, Run(options.run.name, options.run, ""), info, Place.of())
    drafter, _ = trained(parts)
    prompts = [prompt_only(conversation).token_ids for conversation in parts.tokenized["evaluation"]]
    plane = measure(parts.target, drafter, max(prompts, key=len), options.batches)
    temperatures = read_temperatures(parts.run.calibration)

    def aware(mode) -> Calibrated:
        return Calibrated(HardwareAware(hardware=plane, mode=mode, staleness=2, cost_curve="convex"), temperatures)

    ways = {
        "plain": (None, NoDrafts),
        **{f"fixed {k}": (drafter, lambda k=k: Fixed(num_verified_tokens=k)) for k in (1, 2, 4)},
        f"fixed {drafter.num_draft_tokens}": (drafter, lambda: Fixed(num_verified_tokens=drafter.num_draft_tokens)),
        "early stop": (drafter, lambda: aware("early_stop")),
        "global budget": (drafter, lambda: aware("global_budget")),
    }
    sampling = Sampling(max_new_tokens=options.tokens)
    header = ("batch", "way", "tokens/s", "over plain", "tokens/step", "verified drafts/step")
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    for size in options.batches:
        texts, rates, steps = {}, {name: [] for name in ways}, {}
        groups = [
            prompts[start : start + size] for start in range(0, max(options.prompts if size > 1 else 4, size), size)
        ]
        for _ in range(options.rounds):
            for name, (proposer, scheduler) in ways.items():
                start, decoded = time.process_time(), []
                for group in groups:
                    decoded += decode_batch(
                        parts.in_process.batch_verifier(),
                        proposer,
                        group,
                        scheduler=scheduler(),
                        sampling=sampling,
                        num_draft_tokens=0 if proposer is None else drafter.num_draft_tokens,
                        eos_token_ids=parts.target.spec.eos_token_ids,
                    )
                rates[name].append(sum(len(each.token_ids) for each in decoded) / (time.process_time() - start))
                texts[name] = [each.token_ids for each in decoded]
                steps[name] = [step for each in decoded for step in each.steps]
        for name, found in rates.items():
            over = np.median(np.array(found) / np.array(rates["plain"]))
            accepted, verified = (
                np.mean([getattr(step, key) for step in steps[name]]) for key in ("num_accepted", "num_draft_tokens")
            )
            same = "" if texts[name] == texts["plain"] else " (other text)"
            cells = (
                size,
                name + same,
                f"{np.median(found):.2f}",
                f"{over:.2f}",
                f"{1 + accepted:.2f}",
                f"{verified:.2f}",
            )
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
