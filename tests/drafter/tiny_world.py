"""A random target of a few numbers, packed documents of it with uneven masks, and drafters with telling weights."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

import dspark_lab
from dspark_lab.data.packing import Row, collate
from dspark_lab.data.vocabulary import DraftVocabulary
from dspark_lab.drafter.base import Borrowed, Drafter, DraftOutput, Recipe
from dspark_lab.drafter.context import DraftContext
from dspark_lab.drafter.dflash import DFlash
from dspark_lab.drafter.dflash2 import DFlash2
from dspark_lab.drafter.dspark import DSpark
from dspark_lab.drafter.eagle3 import Eagle3
from dspark_lab.drafter.objective import Loss
from dspark_lab.records import Batch, Proposal, TargetSample, TargetSpec
from dspark_lab.target.protocol import TargetHead
from dspark_lab.training.lr_schedules import LrSchedule
from dspark_lab.training.optimizers import AdamW

SPEC = TargetSpec(
    name="tiny",
    model="tiny",
    revision="0",
    fingerprint="0",
    template_hash="0",
    architecture="tiny",
    hidden_size=16,
    intermediate_size=20,
    num_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=29,
    rms_norm_eps=1e-5,
    max_position_embeddings=4096,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    layer_ids=(0, 2, 3),
    mask_token_id=28,
    eos_token_ids=(1,),
)

ROWS = (("00111011", "1111", "0", "001101"), ("0000", "0011111111", "000001"))
"""Loss masks of the documents of each row; rows hold ``ROW_TOKENS`` tokens, the rest is padding."""

ROW_TOKENS = 24
ALL = 1000  # anchors: more than any row has candidates, so that every one of them is drawn

_DRAFT_IDS = (0, 1, 2, 5, 7, 8, 11, 13, 17, 19, 20, 23, 26)
VOCABULARIES = {
    "full": DraftVocabulary.full(SPEC.vocab_size),
    "reduced": DraftVocabulary.of(torch.tensor(_DRAFT_IDS), vocab_size=SPEC.vocab_size),
}

CONF = Path(dspark_lab.__file__).parents[1] / "conf"

_COMMON: dict[str, Any] = {
    "num_layers": 2,
    "intermediate_size": None,
    "head_chunk_tokens": 8,
    "window": None,
    "attention": None,
}
_BLOCK: dict[str, Any] = {**_COMMON, "block_size": 4, "num_anchors": ALL}
_EAGLE: dict[str, Any] = {"feature_norm": None, "norm_before_residual": False, "norm_output": False, "qk_norm": False}
_DSPARK: dict[str, Any] = {"markov": "vanilla", "markov_rank": 6, "markov_init": "paper", "confidence": True}
_DFLASH2: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6}
_DFLASH2 |= {"selector_top_k": 5, "selector_weight": 1.0}
DRAFTERS: dict[str, Callable[..., Drafter]] = {  # name of the YAML file in conf/drafter -> constructor
    "eagle3": partial(Eagle3, **_COMMON, **_EAGLE, ttt_steps=3, num_draft_tokens=5),
    "dflash": partial(DFlash, **_BLOCK, sample_from_anchor=False),
    "dflash2": partial(DFlash2, **_BLOCK, **_DFLASH2, sample_from_anchor=False),
    "dspark": partial(DSpark, **_BLOCK, **_DSPARK, sample_from_anchor=True),
}
LATENT: dict[str, Any] = {"num_heads": 3, "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 4}
LATENT |= {"qk_rope_head_dim": 6, "v_head_dim": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
VARIANTS: dict[str, Callable[..., Drafter]] = {  # further drafters under contract, of the same files
    "dspark_mla": partial(DRAFTERS["dspark"], attention=LATENT),
}


def loss_of(convention: str = "paper", **overrides: Any) -> Loss:
    """``conf/loss/<convention>.yaml``; ``overrides`` change its keys, or those of every algorithm's objective."""
    nodes: Any = OmegaConf.to_container(_convention(convention))
    del nodes["_target_"]
    for key, value in overrides.items():
        if key in nodes:
            nodes[key] = value
        else:
            for objective in (node for node in nodes.values() if isinstance(node, dict)):
                objective[key] = value
    return Loss(**nodes)


def _convention(name: str) -> DictConfig:
    """The file over those that it is based on."""
    node = cast(DictConfig, OmegaConf.load(CONF / "loss" / f"{name}.yaml"))
    bases = [base for base in node.pop("defaults", []) if base != "_self_"]
    return cast(DictConfig, OmegaConf.merge(*map(_convention, bases), node))


def target_head(*, tied: bool = False) -> TargetHead:
    generator = torch.Generator().manual_seed(7)
    embedding = torch.randn(SPEC.vocab_size, SPEC.hidden_size, generator=generator)
    norm = 1 + 0.2 * torch.randn(SPEC.hidden_size, generator=generator)
    lm_head = embedding if tied else torch.randn(SPEC.vocab_size, SPEC.hidden_size, generator=generator)
    return TargetHead(embedding, norm, SPEC.rms_norm_eps, lm_head)


def recipe(*, lr: float = 1e-2, loss: Loss | None = None) -> Recipe:
    optimizer = AdamW(lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    constant = LrSchedule(warmup_share=0.0, decay_share=0.0, decay_shape="linear", final_share=1.0)
    return Recipe(loss=loss or loss_of(), optimizer=optimizer, lr_schedule=constant, seed=3)


def build(
    name: str,
    *,
    vocabulary: str = "full",
    tied: bool = False,
    lr: float = 1e-2,
    loss: Loss | None = None,
    **overrides: Any,
) -> Drafter:
    """The drafter with random weights large enough that everything it sees shows in its logits."""
    borrowed = Borrowed(SPEC, target_head(tied=tied), VOCABULARIES[vocabulary])
    drafter = {**DRAFTERS, **VARIANTS}[name](borrowed=borrowed, recipe=recipe(lr=lr, loss=loss), **overrides)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.ndim > 1 else 1 + 0.2 * noise)
    return drafter


def document(mask: str, *, seed: int) -> TargetSample:
    generator = torch.Generator().manual_seed(seed)
    length = len(mask)
    return TargetSample(
        token_ids=torch.randint(2, SPEC.vocab_size - 1, (length,), generator=generator),
        loss_mask=torch.tensor([digit == "1" for digit in mask]),
        hidden_states=torch.randn(length, len(SPEC.layer_ids), SPEC.hidden_size, generator=generator),
        last_hidden_state=torch.randn(length, SPEC.hidden_size, generator=generator),
    )


def documents(rows: Sequence[Sequence[str]] = ROWS) -> list[list[TargetSample]]:
    count = iter(range(100))
    return [[document(mask, seed=next(count)) for mask in row] for row in rows]


def pack(rows: Sequence[Sequence[TargetSample]], *, row_tokens: int = ROW_TOKENS, epoch: int = 0) -> Batch:
    """Rows named by 40, 41, ... with the samples one after the other."""
    named = [
        (Row(40 + index, tuple(f"key-{index}-{n}" for n in range(len(row)))), row) for index, row in enumerate(rows)
    ]
    return collate(named, row_tokens=row_tokens, epoch=epoch)


def tiny_batch() -> Batch:
    return pack(documents())


def rows_of(batch: Batch, order: Sequence[int]) -> Batch:
    """Those rows of the batch, in that order, under their own names."""
    chosen = {name: value[list(order)] for name in Batch.__slots__ if isinstance(value := getattr(batch, name), Tensor)}
    return replace(batch, **chosen, row_ids=tuple(batch.row_ids[index] for index in order))


def logits_of(drafter: Drafter, output: DraftOutput) -> Tensor:
    """[A, S, V_d], as the loss sees them."""
    return drafter.head(output.hidden, output.previous_token_ids)


def context_of(sample: TargetSample, *, anchor: int) -> DraftContext:
    """What is known when the token at ``anchor`` is the newest one."""
    return DraftContext.start(sample.token_ids[:anchor], sample.hidden_states[:anchor], int(sample.token_ids[anchor]))


def propose(
    drafter: Drafter, context: DraftContext, *, forced_token_ids: Tensor | None = None, **options: Any
) -> Proposal:
    """For one sequence."""
    forced = None if forced_token_ids is None else forced_token_ids[None]
    return drafter.propose([context], forced_token_ids=forced, **options)[0]


def assert_close(actual: Tensor, expected: Tensor, *, relative: float = 1e-5) -> None:
    """max |a - b| <= relative * max |b|."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    error = (actual.double() - expected.double()).abs().max() if actual.numel() else 0.0
    scale = expected.abs().max() if expected.numel() else 0.0
    assert error <= relative * scale, f"error {float(error):.3g} at scale {float(scale):.3g}"
