"""Three small runs as the pipeline would leave them, for the tests of the report."""

from pathlib import Path

import numpy as np

from dspark_lab.evaluation.acceptance import acceptance_metrics
from dspark_lab.evaluation.examples import choose, explain, save_examples
from dspark_lab.evaluation.traces import TRACES_FILE, save_traces
from dspark_lab.records import Trace, VerifyStep
from dspark_lab.report.metrics_log import MetricsLog
from dspark_lab.report.provenance import Machine
from dspark_lab.report.results import RunInfo, StageRecord, update_results
from dspark_lab.report.vocabulary import metric

MACHINE = Machine("Test CPU", 2, 8 * 2**30)
DRAFTERS = {"eagle3": (0.55, 3, 63.6), "dflash": (0.42, 7, 52.1), "dspark": (0.47, 8, 58.4)}
"""Drafter -> conditional acceptance of its first token, draft tokens, tokens/s."""


DOMAINS = ("math", "code", "chat")


def make_traces(chance: float, width: int, *, num_prompts: int, seed: int, confident: bool = False) -> list[Trace]:
    """Prompts are as easy for one drafter as for another; ``confident`` gives each draft its chance, a little too high."""
    prompts, generator = np.random.default_rng(7), np.random.default_rng(seed)
    chance += 0.01 * generator.standard_normal()
    traces = []
    for prompt in range(num_prompts):
        ease = chance + 0.1 * prompts.standard_normal() - 0.05 * (prompt % 3)
        steps = []
        for position in range(40):
            chances = np.clip(ease + 0.2 * generator.standard_normal(), 0.01, 0.99) * 0.93 ** np.arange(width)
            survived = generator.random(width) < chances
            told = tuple(np.minimum(chances * 1.2, 0.999).tolist()) if confident else None
            drafted = tuple(generator.integers(0, 90, width).tolist())
            steps.append(VerifyStep(position, width, int(survived.cumprod().sum()), told, drafted))
        emitted = 1 + sum(step.num_accepted + 1 for step in steps)
        token_ids = tuple(generator.integers(0, 90, emitted).tolist())
        traces.append(Trace(f"prompt-{prompt}", DOMAINS[prompt % 3], tuple(steps), emitted, token_ids))
    return traces


def make_run(
    directory: Path, drafter: str, *, seed: int = 0, learning_rate: float = 1e-3, evaluated: bool = True
) -> Path:
    chance, width, speed = DRAFTERS[drafter]
    run = RunInfo(
        name=f"demo-{drafter}",
        choices={"drafter": drafter, "target": "smollm2_135m"},
        config={
            "drafter": {"num_draft_tokens": width, "_target_": f"dspark_lab.drafter.{drafter}"},
            "optimizer": {"learning_rate": learning_rate},
            "target": {"layer_ids": [2, 15, 27]},
            "run": {"name": f"demo-{drafter}"},
            "evaluate": {"seed": 0},
            "seed": seed,
        },
        config_hash=f"hash-{drafter}",
        command=f"python -m dspark_lab drafter={drafter}",
        seed=seed,
        machine=MACHINE,
        versions={"python": "3.11.2", "torch": "2.13.0"},
    )
    _write_curves(directory, chance)
    capture = StageRecord(
        "capture",
        61.5,
        num_in=1000,
        num_out=996,
        dropped={"no_supervised_tokens": 4},
        events={"reused": 500},
        machine="m",
    )
    update_results(directory, run=run, stage=capture, metrics=[metric("stored_bytes", 10**9, origin="measured")])
    trained = {"num_train_steps": 300, "num_train_tokens": 1_234_567, "train_time_s": 200.4, "train_flops": 4e12}
    metrics = [metric(name, value, origin="measured") for name, value in trained.items()]
    update_results(directory, run=run, stage=StageRecord("train", 200.4, machine="m"), metrics=metrics)
    if evaluated:
        found: dict[str, list[Trace]] = {}
        for origin, num_prompts in (("measured", 20), ("replayed", 60)):
            setting = {"mode": origin, "benchmark": "gsm_symbolic", "temperature": 0.0, "num_draft_tokens": width}
            traces = make_traces(chance, width, num_prompts=num_prompts, seed=seed, confident=drafter == "dspark")
            found[origin] = traces
            metrics = acceptance_metrics(traces, setting=setting, origin=origin)
            if origin == "measured":
                speeds = {"loop_tokens_per_s": speed, "loop_plain_tokens_per_s": 46.6, "loop_speedup": speed / 46.6}
                metrics += [metric(name, value, origin=origin, setting=setting) for name, value in speeds.items()]
            update_results(
                directory, run=run, stage=StageRecord(f"evaluate_{origin}", 30.0, machine="m"), metrics=metrics
            )
        save_traces(directory / TRACES_FILE, found)
        shown = choose(found["measured"], 3)
        save_examples(directory, [explain(t, prompt="What is 2 + 3?", origin="measured", piece=piece) for t in shown])
    return directory


def piece(token: int) -> str:
    """Text of a token of an invented vocabulary."""
    return f" {['ab', 'cde', 'fgh', 'ijkl'][token % 4]}{token}" if token % 11 else ".\n"


def _write_curves(directory: Path, chance: float) -> None:
    log = MetricsLog(directory)
    for step in range(1, 301):
        values = {"time_s": step * 0.668, "tokens": step * 4096, "train/loss": 2 + 6 * chance * 0.985**step}
        log.write(values, step=step)
        if step % 50 == 0:
            length = 1 + 1.7 * chance * (1 - 0.98**step)
            values = {"val/acceptance_length": length, "val/acceptance_length_estimate": length - 0.05}
            log.write({"time_s": step * 0.668, **values}, step=step)
    log.close()
