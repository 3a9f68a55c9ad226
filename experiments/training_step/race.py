"""Acceptance over CPU time and over tokens: our training and Speculators', same drafter, rows, anchors and AdamW.

    python -m dspark_lab +experiment=demo 'stages=[regenerate,capture]' \\
        data.train.num_prompts=651 data.validation.num_prompts=40
    export OMP_NUM_THREADS=1
    python experiments/training_step/race.py --side ours --drafter dspark --out race.jsonl
    python experiments/training_step/race.py --side speculators --drafter dspark --out race.jsonl

Speculators' drafter learns under its own default loss, ours under ours (``loss=paper``). Both are measured with the weights
in our classes: the estimate of training (drafter's and target's arg-max, on held-out rows), and at the end by replay of
held-out answers. Measuring is not counted as training time.
Further arguments are overrides of the config, e.g. ``optimizer=muon drafter.num_anchors=96``.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import speculators_peer as peer
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from lightning import seed_everything
from omegaconf import DictConfig
from torch import Tensor, nn
from torchmetrics import MeanMetric

from dspark_lab.configs import config_folder
from dspark_lab.data.datamodule import Collation, RowSampler, StoredRows
from dspark_lab.drafter.base import Drafter
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.eagle3 import Eagle3
from dspark_lab.drafter.start import select_newest
from dspark_lab.evaluation.acceptance import AcceptanceLengthEstimate, acceptance_length
from dspark_lab.evaluation.replay import ReplayResult, evaluate_replay
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.parts import Parts
from dspark_lab.records import Batch, Sampling, TargetSample
from dspark_lab.training.place import Place

DATA = ["+experiment=demo", "data.train.num_prompts=651", "data.validation.num_prompts=40"]
VALIDATION_ANCHORS = 256  # of a row: more than training draws, for a quieter curve
Loss = Callable[[Batch, list[TargetSample]], Tensor]


@dataclass(frozen=True)
class Trained:
    """What is trained; ``drafter`` is what is measured, after its weights were brought up to date by ``publish``."""

    module: nn.Module
    drafter: Drafter
    loss: Loss
    publish: Callable[[], None]


def config_of(overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("config", [*DATA, *overrides])


def parts_of(name: str, side: str, overrides: list[str], seed: int) -> Parts:
    """``loss`` decides the supervision, so Speculators' side needs its own."""
    loss = ["loss=speculators"] if side == "speculators" else []
    config = config_of([f"drafter={name}", f"seed={seed}", *loss, *overrides])
    info: Any = SimpleNamespace(choices={"store": "disk", "engine": "huggingface", "cluster": "attach"})
    no_run: Any = None
    seed_everything(seed, verbose=False)
    return Parts(config, no_run, info, Place.of())


def ours(parts: Parts, *, start: str | None, dense: float) -> Trained:
    drafter = parts.drafter.train()
    if start == "fc":
        assert isinstance(drafter, BlockDrafter)
        select_newest(drafter)

    def loss(batch: Batch, samples: list[TargetSample]) -> Tensor:
        total = drafter.loss(drafter(batch), batch).total
        if dense:
            assert isinstance(drafter, BlockDrafter)
            total = total + dense * dense_loss(drafter, batch)
        return total

    return Trained(drafter, drafter, loss, lambda: None)


def dense_loss(drafter: BlockDrafter, batch: Batch) -> Tensor:
    """``--dense``: cross-entropy of the target's argmax, told from the context state of a token itself, at 256 tokens."""
    tokens = batch.loss_mask.flatten().nonzero().flatten()
    tokens = tokens[torch.randperm(len(tokens))[:256]]
    states = drafter.hidden_norm(drafter.fc(drafter.features(batch.hidden_states.flatten(0, 1)[tokens])))
    with torch.no_grad():
        labels = drafter.teacher_logits(batch.last_hidden_state.flatten(0, 1)[tokens]).argmax(-1)
    return F.cross_entropy(F.linear(states, drafter.draft_rows), labels)


def in_fp32(states: Any) -> Any:
    return replace(
        states, hidden_states=states.hidden_states.float(), last_hidden_state=states.last_hidden_state.float()
    )


def speculators(parts: Parts) -> Trained:
    drafter, row_tokens = parts.drafter, parts.corpus.row_tokens
    model = peer.peer_of(drafter)

    def loss(batch: Batch, samples: list[TargetSample]) -> Tensor:
        batch, *samples = (in_fp32(each) for each in (batch, *samples))  # states are stored in bf16
        if isinstance(drafter, Eagle3):
            return peer.run_chains(model, drafter, samples, row_tokens)[0]
        assert isinstance(drafter, BlockDrafter)
        return peer.run_blocks(model, drafter, batch)[0]

    def publish() -> None:
        theirs = model.state_dict()
        drafter.load_state_dict({name: theirs[name] for name in drafter.state_dict()})

    return Trained(model, drafter, loss, publish)


def rows(parts: Parts) -> Iterator[tuple[Batch, list[TargetSample]]]:
    """One row after the other, epoch after epoch."""
    data = parts.datamodule
    sampler = RowSampler(data.train_lengths, row_tokens=data.row_tokens, rows_per_batch=1, seed=data.seed)
    stored, collate = StoredRows(parts.store), Collation(data.row_tokens)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for indices in sampler:
            found = [stored[index] for index in indices]
            yield collate(found), list(found[0][2])


class Measure:
    """Held-out acceptance, by one definition for both sides: slots and anchors as ``loss=paper`` has them."""

    def __init__(self, parts: Parts) -> None:
        data = parts.datamodule
        self.parts = parts
        self.paper = build(config_of([]), "loss")
        sampler = RowSampler(data.validation_lengths, row_tokens=data.row_tokens, rows_per_batch=1, seed=0)
        self.batches = [
            Collation(data.row_tokens)([StoredRows(parts.store)[i] for i in indices]) for indices in sampler
        ]

    def __call__(self, drafter: Drafter, *, num_replayed: int) -> dict[str, float]:
        drafter.eval()
        trained_by, drafter.recipe = drafter.recipe, replace(drafter.recipe, loss=self.paper)
        num_anchors = getattr(drafter, "num_anchors", 0)
        if isinstance(drafter, BlockDrafter):
            drafter.num_anchors = VALIDATION_ANCHORS
        estimate, first = AcceptanceLengthEstimate(), MeanMetric()
        with torch.no_grad():
            for batch in self.batches:
                output = drafter(batch)
                agreement = drafter.agreement(output)
                estimate.update(agreement, output.supervised)
                first.update(agreement[:, 0][output.supervised[:, 0]].float())
        found = {"estimate": float(estimate.compute()), "first_slot": float(first.compute())}
        if num_replayed:
            found["replayed"] = acceptance_length(self.replay(drafter, num_replayed).traces)
        drafter.recipe = trained_by
        if isinstance(drafter, BlockDrafter):
            drafter.num_anchors = num_anchors
        drafter.train()
        return found

    def replay(self, drafter: Drafter, num_conversations: int) -> ReplayResult:
        return evaluate_replay(
            drafter,
            self.parts.store.get,
            self.parts.conversations.tokenized["validation"][:num_conversations],
            sampling=Sampling(),
            num_draft_tokens=drafter.num_draft_tokens,
            target_head=drafter.target_head,
            eos_token_ids=drafter.target.eos_token_ids,
            seed=0,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=("ours", "speculators"), required=True)
    parser.add_argument("--drafter", choices=("eagle3", "dflash", "dspark"), required=True)
    parser.add_argument("--label", help="of the curve; default: the side")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=180, help="of CPU time, measuring left out")
    parser.add_argument("--every", type=float, default=30, help="seconds between measurements")
    parser.add_argument("--replayed", type=int, default=20, help="conversations, at the end")
    parser.add_argument("--lr", type=float, default=1e-3, help="after a warm-up of 20 steps")
    parser.add_argument("--start", choices=("fc",), help="of our side: a selection of the newest state")
    parser.add_argument("--dense", type=float, default=0.0, help="of our side: weight of a loss at context states")
    parser.add_argument("--out", type=Path, required=True, help="a line is appended per measurement")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    parts = parts_of(arguments.drafter, arguments.side, arguments.overrides, arguments.seed)
    started = {"start": arguments.start, "dense": arguments.dense}
    trained = ours(parts, **started) if arguments.side == "ours" else speculators(parts)
    trainable = [parameter for parameter in trained.module.parameters() if parameter.requires_grad]
    optimizer = trained.drafter.recipe.optimizer.build(trained.module)
    measure = Measure(parts)
    parts.release()

    used_s = next_s = 0.0
    num_tokens = 0
    for step, (batch, samples) in enumerate(rows(parts)):
        if used_s >= next_s:
            trained.publish()
            line = {
                "label": arguments.label or arguments.side,
                "drafter": arguments.drafter,
                "seed": arguments.seed,
                "cpu_s": used_s,
                "tokens": num_tokens,
                "steps": step,
                **measure(trained.drafter, num_replayed=arguments.replayed if used_s >= arguments.seconds else 0),
            }
            print(json.dumps(line), flush=True)
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            next_s += arguments.every
        if used_s >= arguments.seconds:
            break
        started = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * min(1.0, (step + 1) / 20)
        trained.loss(batch, samples).backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        used_s += time.process_time() - started
        num_tokens += batch.num_tokens


if __name__ == "__main__":
    main()
