"""Imported weights into a drafter that was built from the config: whether they fit, then how they are loaded."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from dspark_lab.checkpoint.reading import Checkpoint
from dspark_lab.data.vocabulary import bounded_size
from dspark_lab.drafter.base import Drafter
from dspark_lab.records import TargetSpec

_TARGETS = ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t")


def check_fit(
    checkpoint: Checkpoint,
    *,
    algorithm: str,
    options: Mapping[str, Any],
    draft_vocab_size: int | None,
    target: TargetSpec,
) -> None:
    """Whether config and target are those of the checkpoint; ``options`` is the config's ``drafter`` node.

    The config stays the one place where a drafter's shape is said, so a difference is an error, with the overrides that
    mend it; only what no key sets (heads, epsilon and RoPE of the layers) comes from the checkpoint.

    Raises:
        ValueError: every difference, what was expected and found, and the mend.
    """
    found = checkpoint.description
    place = f"drafter.from_pretrained={checkpoint.source!r}"
    if found.algorithm != algorithm:
        raise ValueError(f"{place} holds a drafter of kind {found.algorithm}: run with drafter={found.algorithm}")
    other_target = [
        f"{key}: {theirs} in the checkpoint, {mine} of target {target.name}"
        for key, theirs, mine in [
            ("hidden_size", found.hidden_size, target.hidden_size),
            ("vocab_size", found.vocab_size, target.vocab_size),
            ("num_target_layers", found.num_target_layers, target.num_layers),
        ]
        if theirs not in (None, mine)
    ]
    if other_target:
        made_for = f" ({found.verifier})" if found.verifier else ""
        raise ValueError(
            f"{place} was made for another target{made_for}: {'; '.join(other_target)}. Choose its target with target=..."
        )
    n = target.num_layers
    layer_ids = list(found.layer_ids or (2, n // 2, n - 3))
    pairs = {
        **{f"drafter.{key}": (value, _chosen(options, key, value, target)) for key, value in found.options.items()},
        "target.layer_ids": (layer_ids, list(target.layer_ids)),
        "data.draft_vocab_size": (
            found.draft_vocab_size,
            bounded_size(draft_vocab_size, vocab_size=target.vocab_size),
        ),
    }
    if found.latent is not None:
        pairs["drafter.attention"] = (asdict(found.latent), options.get("attention"))
    elif options.get("attention") is not None:
        theirs = found.layers
        own = (theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim, dict(theirs.rope_parameters))
        names = ("num_heads", "num_kv_heads", "head_dim", "rope_parameters")
        if tuple(options["attention"].get(name) for name in names) != own:
            raise ValueError(
                f"{place} has attention {dict(zip(names, own, strict=True))}, drafter.attention says another: leave it to "
                "the checkpoint with drafter.attention=null"
            )
    if found.mask_token_id is not None:
        pairs["target.mask_token_id"] = (found.mask_token_id, target.mask_token_id)
    if found.options.get("markov", "vanilla") is None:
        del pairs["drafter.markov_rank"]
    differing = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if differing:
        told = "; ".join(f"{key}: {theirs} in the checkpoint, {mine} here" for key, (theirs, mine) in differing.items())
        mend = " ".join(_override(key, theirs) for key, (theirs, _) in differing.items())
        raise ValueError(f"{place} ({checkpoint.format} format) differs from the config: {told}. Run with {mend}")


def load_weights(drafter: Drafter, checkpoint: Checkpoint) -> None:
    """Copy the checkpoint's weights into ``drafter``, in its own precision.

    Raises:
        ValueError: tensors are missing, unknown or of another shape, or its embedding or head is not the target's.
    """
    place = f"drafter.from_pretrained={checkpoint.source!r}"
    given = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in _TARGETS}
    wanted = drafter.state_dict()
    problems = [
        *(f"{name}: missing (expected {list(wanted[name].shape)})" for name in wanted.keys() - given.keys()),
        *(f"{name}: not a parameter of this drafter" for name in given.keys() - wanted.keys()),
        *(
            f"{name}: expected {list(wanted[name].shape)}, found {list(given[name].shape)}"
            for name in wanted.keys() & given.keys()
            if wanted[name].shape != given[name].shape
        ),
    ]
    if problems:
        raise ValueError(f"{place} does not fit {type(drafter).__name__}: {'; '.join(sorted(problems))}")
    _take_target_tensors(drafter, checkpoint, place)
    drafter.load_state_dict(given)


def _take_target_tensors(drafter: Drafter, checkpoint: Checkpoint, place: str) -> None:
    """The target's own matrices are used where the checkpoint's are copies of them; only EAGLE-3 may bring a head."""
    embedding = checkpoint.tensors.get("embed_tokens.weight")
    if embedding is not None and not _same(embedding, drafter.target_head.embedding):
        raise ValueError(
            f"{place}: embed_tokens.weight is not the embedding of target {drafter.target.name}: choose the target it was "
            "made for; drafters with a trained embedding cannot be read"
        )
    head = checkpoint.tensors.get("lm_head.weight")
    if head is None or _same(head, drafter.draft_rows):
        return
    if head.shape != drafter.draft_rows.shape:
        raise ValueError(
            f"{place}: lm_head.weight: expected {list(drafter.draft_rows.shape)}, found {list(head.shape)}"
        )
    if not drafter.chained:
        raise ValueError(
            f"{place}: lm_head.weight is not the head of target {drafter.target.name}: choose the target it was made for"
        )
    drafter.head_rows = head.to(drafter.draft_rows)


def _same(found: Tensor, expected: Tensor) -> bool:
    """Equal up to rounding to bf16; in pieces, as vocabulary matrices are large."""
    if found.shape != expected.shape:
        return False
    pieces = zip(found.split(8192), expected.cpu().split(8192), strict=True)
    return all(torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-6) for a, b in pieces)


def _chosen(options: Mapping[str, Any], key: str, like: Any, target: TargetSpec) -> Any:
    """What the config has under ``key``, in the form of the checkpoint's value ``like``."""
    value = options.get(key)
    if key == "intermediate_size" and value is None:
        return target.intermediate_size
    if key == "window" and value is not None and like is not None:
        return {part: value[part] for part in like}
    return value


def _override(key: str, value: Any) -> str:
    if isinstance(value, dict) and "tokens" in value:
        value = {"tokens": value["tokens"], "origin": "anchor", "causal": value.get("causal", True), **value}
    text = f"{key}={_plain(value)}"
    return f"'{text}'" if isinstance(value, list | dict) else text


def _plain(value: Any) -> str:
    """As Hydra reads it."""
    if isinstance(value, list):
        return f"[{','.join(map(_plain, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{_plain(entry)}' for name, entry in value.items())}}}"
    return value if isinstance(value, str) else json.dumps(value)
