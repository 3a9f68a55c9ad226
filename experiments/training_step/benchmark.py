"""Time and memory of a training step beside Speculators' for the same work: weights, rows, anchors, loss, threads, AdamW.

    python experiments/training_step/benchmark.py --shapes table     # README's first table
    python experiments/training_step/benchmark.py --shapes growth    # longer rows, more anchors; ours alone
    python experiments/training_step/benchmark.py --shapes gpu       # on CUDA, in bf16: `make gpu-check`
    python experiments/training_step/benchmark.py --drafter dspark --row 512 --anchors 64 --rounds 5

Time: one process alternates the two sides. Memory: a fresh process for each side, peak resident memory (on CUDA: allocated)
less what was there after imports and the construction of model and batch.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import nn

from dspark_lab.configs import config_folder
from dspark_lab.data.packing import Row, collate
from dspark_lab.data.vocabulary import DraftVocabulary
from dspark_lab.drafter.base import Borrowed, Drafter, Recipe
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.eagle3 import Eagle3
from dspark_lab.pipeline.build import build
from dspark_lab.records import Batch, TargetSample, TargetSpec
from dspark_lab.target.protocol import TargetHead

DRAFTERS = ("eagle3", "dflash", "dspark")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}  # of the losses' ratio


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Shape:
    hidden: int
    vocabulary: int
    heads: int
    key_heads: int
    row: int
    anchors: int
    draft_vocabulary: int
    window: int = 0  # 0: none

    def __str__(self) -> str:
        draft = "full" if self.draft_vocabulary == self.vocabulary else f"{self.draft_vocabulary}"
        window = f", window {self.window}" if self.window else ""
        return f"H {self.hidden}, V {self.vocabulary} ({draft}), row {self.row}, {self.anchors} anchors{window}"


SMALL = {"hidden": 576, "vocabulary": 49152, "heads": 9, "key_heads": 3}
LARGE = {"hidden": 2048, "vocabulary": 151936, "heads": 32, "key_heads": 8}
TABLE = [
    Shape(**SMALL, row=row, anchors=anchors, draft_vocabulary=draft)
    for row, anchors, draft in itertools.product((512, 2048), (64, 256), (49152, 8192))
] + [Shape(**LARGE, row=2048, anchors=128, draft_vocabulary=151936)]
GROWTH = [
    *(
        Shape(**SMALL, row=row, anchors=64, draft_vocabulary=8192, window=2048)
        for row in (512, 1024, 2048, 4096, 8192, 16384)
    ),
    *(Shape(**SMALL, row=2048, anchors=anchors, draft_vocabulary=8192, window=2048) for anchors in (32, 64, 128, 256)),
]
GPU = [
    Shape(hidden=4096, vocabulary=151936, heads=32, key_heads=8, row=8192, anchors=1024, draft_vocabulary=draft)
    for draft in (151936, 32768)
]
SHAPES = {"table": TABLE, "growth": GROWTH, "gpu": GPU}


def target_of(shape: Shape) -> TargetSpec:
    return TargetSpec(
        name="random", model="random", revision="0", fingerprint="0", template_hash="0", architecture="random",
        hidden_size=shape.hidden, intermediate_size=shape.hidden * 8 // 3 // 64 * 64, num_layers=30,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads, head_dim=shape.hidden // shape.heads,
        vocab_size=shape.vocabulary, rms_norm_eps=1e-5, max_position_embeddings=65536,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, layer_ids=(2, 15, 27), mask_token_id=16,
        eos_token_ids=(2,),
    )  # fmt: skip


def drafter_of(name: str, shape: Shape, *, chunk: int) -> Drafter:
    """As configured, with Speculators' loss; its EAGLE-3 options too."""
    torch.manual_seed(0)
    target = target_of(shape)
    embedding = 0.02 * torch.randn(shape.vocabulary, shape.hidden)
    lm_head = 0.02 * torch.randn(shape.vocabulary, shape.hidden)
    head = TargetHead(embedding, torch.ones(shape.hidden), target.rms_norm_eps, lm_head)
    options = [f"drafter={name}", "loss=speculators", f"drafter.head_chunk_tokens={chunk}"]
    if name == "eagle3":
        options += ["drafter.feature_norm=joint", "drafter.norm_before_residual=true", "drafter.norm_output=true"]
    else:
        options += [f"drafter.num_anchors={shape.anchors}"]
    if shape.window:
        options += [f"drafter.window={{tokens: {shape.window}, origin: anchor, causal: true, full_layers: []}}"]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", options)
    recipe = Recipe(*(build(config, group) for group in ("loss", "optimizer", "lr_schedule")), seed=1)
    every = max(shape.vocabulary // shape.draft_vocabulary, 1)
    ids = torch.arange(0, shape.vocabulary, every)[: shape.draft_vocabulary]
    vocabulary = DraftVocabulary.of(ids, vocab_size=shape.vocabulary)
    borrowed = Borrowed(target, head, vocabulary)
    return build(config, "drafter", without=("from_pretrained",), borrowed=borrowed, recipe=recipe).train()


def samples_of(shape: Shape, *, device: str = DEVICE) -> list[TargetSample]:
    """Documents of 256 tokens (the last one shorter): a prompt of a quarter, then the answer."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for start in range(0, shape.row, 256):
        length = min(256, shape.row - start)
        samples.append(
            TargetSample(
                token_ids=torch.randint(20, shape.vocabulary, (length,), generator=generator).to(device),
                loss_mask=(torch.arange(length) >= length // 4).to(device),
                hidden_states=torch.randn(length, 3, shape.hidden, generator=generator).to(device),
                last_hidden_state=torch.randn(length, shape.hidden, generator=generator).to(device),
            )
        )
    return samples


def batch_of(shape: Shape) -> Batch:
    samples = samples_of(shape, device="cpu")
    row = Row(0, tuple(map(str, range(len(samples)))))
    return collate([(row, samples)], row_tokens=shape.row, epoch=0).to(DEVICE)


Side = Callable[[], float]
"""One training step; gives its loss."""


def side(which: str, name: str, shape: Shape, *, precision: str, chunk: int) -> Side:
    with warnings.catch_warnings():  # both sides import the same: what a first step would import late is not its memory
        warnings.simplefilter("ignore")
        import speculators_peer as peer
    drafter, batch = drafter_of(name, shape, chunk=chunk).to(DEVICE), batch_of(shape)
    if which == "ours":
        module: nn.Module = drafter

        def loss_of() -> torch.Tensor:
            return drafter.loss(drafter(batch), batch).total
    else:
        module = peer.peer_of(drafter)
        samples = samples_of(shape)

        def loss_of() -> torch.Tensor:
            if isinstance(drafter, Eagle3):
                return peer.run_chains(module, drafter, samples, shape.row)[0]
            assert isinstance(drafter, BlockDrafter)
            return peer.run_blocks(module, drafter, batch)[0]

    if which == "ours":
        optimizer = drafter.recipe.optimizer.build(drafter)
    else:  # as its trainer builds it
        optimizer = torch.optim.AdamW(p for p in module.parameters() if p.requires_grad)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # every round is the same step

    def step() -> float:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        return float(loss.detach())

    return step


def measure_time(
    which_sides: Sequence[str], name: str, shape: Shape, *, precision: str, rounds: int, chunk: int
) -> dict[str, Any]:
    """Seconds of each side, the median of the ratios, and the losses. The first round warms up."""
    sides = {which: side(which, name, shape, precision=precision, chunk=chunk) for which in which_sides}
    times: dict[str, list[float]] = {which: [] for which in sides}
    losses = {}
    for _ in range(rounds + 1):
        for which, step in sides.items():
            started = time.perf_counter()
            losses[which] = step()
            times[which].append(time.perf_counter() - started)
    found = {f"{which}_s": statistics.median(seconds[1:]) for which, seconds in times.items()}
    if "speculators" in times:
        pairs = zip(times["ours"][1:], times["speculators"][1:], strict=True)
        found["ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return {**found, "losses": losses}


def measure_memory(which: str, name: str, shape: Shape, *, precision: str, chunk: int) -> dict[str, float]:
    """Bytes of two steps in this process: peak above what was resident when they began, and in all."""
    step = side(which, name, shape, precision=precision, chunk=chunk)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(2):
            step()
        peak = torch.cuda.max_memory_allocated()
        return {"step_bytes": peak - before, "total_bytes": peak}
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = resident_bytes("VmRSS")
    for _ in range(2):
        step()
    peak = resident_bytes("VmHWM")
    return {"step_bytes": peak - before, "total_bytes": peak}


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def in_own_process(which: str, name: str, shape: Shape, arguments: argparse.Namespace) -> dict[str, float]:
    command = [
        sys.executable, __file__, "--memory-of", which, "--drafter", name, "--shape", json.dumps(asdict(shape)),
        "--precision", arguments.precision, "--chunk", str(arguments.chunk),
    ]  # fmt: skip
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def matmul_flops(name: str, shape: Shape) -> float:
    """FLOPs of the matrix products that a step cannot do without, attention's own left out.

    Over the row: ``fc``, keys and values of the context. Over the predicting slots: the layers; draft logits forward and
    their gradient to the states (the matrices are frozen); DSpark's W2 both ways. Target logits: once per token.
    """
    drafter, batch = drafter_of(name, shape, chunk=256).to(DEVICE), batch_of(shape)
    with torch.no_grad():
        output = drafter(batch)
    slots = output.hidden.shape[0] * output.hidden.shape[1]
    matrices = {key: parameter.numel() for key, parameter in drafter.named_parameters() if parameter.ndim == 2}
    layers = sum(size for key, size in matrices.items() if key.startswith("layers."))
    context = sum(size for key, size in matrices.items() if key == "fc.weight" or ".k_proj" in key or ".v_proj" in key)
    head, markov = shape.hidden * shape.draft_vocabulary, matrices.get("markov_head.markov_w2.weight", 0)
    needs_target = drafter.objective.labels == "target"
    teacher = len(output.teacher.unique()) * head if needs_target else 0
    return 2 * (slots * (3 * layers + 2 * head + 3 * markov) + shape.row * 3 * context + teacher)


def matmul_rate(precision: str) -> float:
    """FLOP/s of one large product, the best of five."""
    size, dtype = 8192 if DEVICE == "cuda" else 2048, torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, dtype=dtype, device=DEVICE) for _ in "ab")
    times = []
    for _ in range(5):
        synchronize()
        started = time.perf_counter()
        torch.mm(a, b)
        synchronize()
        times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times)


def rows_of(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shapes = SHAPES[arguments.shapes] if arguments.shapes else [arguments.shape]
    names = DRAFTERS if arguments.drafter is None else (arguments.drafter,)
    sides = ("ours",) if arguments.shapes == "growth" else ("ours", "speculators")
    for shape, name in itertools.product(shapes, names):
        if name == "eagle3" and arguments.shapes and shape.anchors != 64 and shape.hidden == SMALL["hidden"]:
            continue  # EAGLE-3 has no anchors
        how = {"precision": arguments.precision, "chunk": arguments.chunk}
        found = measure_time(sides, name, shape, rounds=arguments.rounds, **how)
        floor = matmul_flops(name, shape) / matmul_rate(arguments.precision)
        memory = {which: in_own_process(which, name, shape, arguments) for which in sides}
        yield {"shape": shape, "drafter": name, "floor_s": floor, "memory": memory, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, help="a set of them, instead of one")
    parser.add_argument("--drafter", choices=DRAFTERS)
    parser.add_argument("--row", type=int, default=512)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--draft-vocabulary", type=int, default=49152)
    parser.add_argument(
        "--shape", type=lambda text: Shape(**json.loads(text)), help="as JSON, instead of the three above"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16" if DEVICE == "cuda" else "fp32")
    parser.add_argument("--rounds", type=int, default=5)
    chunk = 4096 if DEVICE == "cuda" else 256
    parser.add_argument("--chunk", type=int, default=chunk, help=f"drafter.head_chunk_tokens ({chunk})")
    parser.add_argument("--memory-of", choices=("ours", "speculators"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="append a line per measurement")
    arguments = parser.parse_args()
    sized = {"row": arguments.row, "anchors": arguments.anchors, "draft_vocabulary": arguments.draft_vocabulary}
    arguments.shape = arguments.shape or Shape(**SMALL, **sized)
    if arguments.memory_of:
        how = {"precision": arguments.precision, "chunk": arguments.chunk}
        print(json.dumps(measure_memory(arguments.memory_of, arguments.drafter, arguments.shape, **how)))
        return
    header = ["shape", "drafter", "ours, s", "Speculators, s", "ratio", "floor, s", "/ floor"]
    header += ["ours, MiB", "Speculators, MiB", "ratio"]
    print(f"| {' | '.join(header)} |\n|---|---|{'--:|' * 8}", flush=True)
    for row in rows_of(arguments):
        mib = {which: memory["step_bytes"] / 2**20 for which, memory in row["memory"].items()}
        ours_s, ours, theirs = row["ours_s"], mib["ours"], mib.get("speculators")
        cells = [ours_s, row.get("speculators_s"), row.get("ratio"), row["floor_s"], ours_s / row["floor_s"]]
        shown = ["-" if cell is None else f"{cell:.2f}" for cell in cells]
        shown += [f"{ours:.0f}", *(["-", "-"] if theirs is None else [f"{theirs:.0f}", f"{ours / theirs:.2f}"])]
        print(f"| {' | '.join([str(row['shape']), row['drafter'], *shown])} |", flush=True)
        losses = row["losses"]
        assert abs(losses["ours"] / losses.get("speculators", losses["ours"]) - 1) < TOLERANCE[arguments.precision], (
            losses
        )
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps({**row, "shape": asdict(row["shape"])}) + "\n")


if __name__ == "__main__":
    main()
