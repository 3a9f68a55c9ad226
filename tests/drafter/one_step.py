"""Two training steps of a narrow Kimi-K3 drafter; prints the plan's bytes and the process's own (test_training_memory)."""

import json
import resource
from dataclasses import replace

import psutil
import torch
from hydra import compose, initialize_config_dir

from dspark_lab.cluster.plan.memory import TrainingPlace, total_bytes, training_memory
from dspark_lab.configs import config_folder
from dspark_lab.data.vocabulary import DraftVocabulary
from dspark_lab.drafter.base import Borrowed, Recipe
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.plan import size_of, spec_of_facts
from dspark_lab.records import Batch
from dspark_lab.target.protocol import TargetHead

ROW_TOKENS, WIDTH, NUM_ANCHORS = 8192, 7168 // 64, 128
NARROW = [
    "drafter.intermediate_size=224",
    "drafter.attention.num_heads=6",
    "drafter.attention.num_kv_heads=1",
    "drafter.attention.head_dim=16",
    "drafter.markov_rank=4",
    f"drafter.num_anchors={NUM_ANCHORS}",
    "drafter.head_chunk_tokens=256",
]


def main() -> None:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", ["+experiment=kimi_k3_dspark", *NARROW])
    found = spec_of_facts(config)
    assert found is not None
    spec = replace(found, hidden_size=WIDTH)
    loss, optimizer, schedule = (build(config, name) for name in ("loss", "optimizer", "lr_schedule"))
    vocabulary = DraftVocabulary.full(spec.vocab_size)
    warm_up()
    before = psutil.Process().memory_info().rss
    matrices = [torch.randn(spec.vocab_size, WIDTH) * 0.1 for _ in range(2)]
    head = TargetHead(matrices[0], torch.ones(WIDTH), spec.rms_norm_eps, matrices[1])
    drafter = build(
        config,
        "drafter",
        without=("from_pretrained",),
        borrowed=Borrowed(spec, head, vocabulary),
        recipe=Recipe(loss=loss, optimizer=optimizer, lr_schedule=schedule, seed=1),
    )
    batch = row(spec.vocab_size, len(spec.layer_ids))
    steps = optimizer.build(drafter)
    for _ in range(2):  # the second one has gradients and the optimizer's state from the first
        terms = drafter.loss(drafter(batch), batch)
        steps.zero_grad()
        terms.numerator.backward()
        steps.step()
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = size_of(drafter, row_tokens=ROW_TOKENS, muon=True)
    place = TrainingPlace(num_ranks=1, sharded=False, rows_per_batch=1, bf16=False, on_cpu=True)
    held = training_memory(size, place)
    told = {
        "measured": peak - before,
        "planned": total_bytes(held),
        "vocab_size": spec.vocab_size,
        "row_tokens": ROW_TOKENS,
        "held": held,
    }
    print(json.dumps(told))


def warm_up() -> None:
    """The libraries' own memory, before it is measured."""
    weight = torch.randn(64, 64, requires_grad=True)
    (weight @ weight).softmax(-1).sum().backward()


def row(vocab_size: int, num_layers: int) -> Batch:
    """One row of four documents of 2,048 tokens, all supervised but their first quarter."""
    index = torch.arange(ROW_TOKENS)
    return Batch(
        token_ids=torch.randint(0, vocab_size, (1, ROW_TOKENS)),
        loss_mask=(index % 2048 >= 512)[None],
        document_ids=(index // 2048)[None],
        position_ids=(index % 2048)[None],
        hidden_states=torch.randn(1, ROW_TOKENS, num_layers, WIDTH).bfloat16(),
        last_hidden_state=torch.randn(1, ROW_TOKENS, WIDTH).bfloat16(),
        row_ids=(0,),
        epoch=0,
        keys=("a",),
    )


if __name__ == "__main__":
    main()
