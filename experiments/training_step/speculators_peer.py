"""A drafter in Speculators' own classes, with the same weights, rows and anchors; the parity tests use it too."""

import json
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.losses.eager import tv_loss
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash import core as dflash_core
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dflash2 import DFlash2SpeculatorConfig
from speculators.models.dflash2.core import DFlash2DraftModel
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

from dspark_lab.checkpoint.description import format_of
from dspark_lab.drafter.base import Drafter
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.dflash2 import DFlash2
from dspark_lab.drafter.dspark import DSpark
from dspark_lab.drafter.eagle3 import Eagle3
from dspark_lab.drafter.layers import SlidingWindow
from dspark_lab.records import Batch, TargetSample

TERMS = {  # our names -> theirs
    "ce": "ce",
    "kl": "kl_div",
    "reverse_kl": "rkl",
    "js": "jsd",
    "tv": "tv",
    "nla": "nla",
    "lk": "lk_hybrid",
}


def layer_config(drafter: Drafter, window: SlidingWindow | None, *, qwen3: bool) -> Any:
    num_layers, target = len(drafter.layers), drafter.target  # pyright: ignore
    shared: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_parameters": dict(target.rope_parameters),
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }
    config = Qwen3Config(**shared) if qwen3 else LlamaConfig(**shared)
    if window is not None:
        config.sliding_window = window.tokens
        config.layer_types = [
            "full_attention" if layer in window.full_layers else "sliding_attention" for layer in range(num_layers)
        ]
    config._attn_implementation = (
        "simple_flex_attention" if drafter.device.type == "cuda" else "sdpa"
    )  # the fastest of each
    return config


def speculators_config(algorithm: str, num_tokens: int) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )


def peer_of(drafter: Drafter) -> nn.Module:
    """Their model with our weights and the target's matrices."""
    assert isinstance(drafter, Eagle3 | BlockDrafter)
    window = drafter.window_attention
    common: dict[str, Any] = {"draft_vocab_size": drafter.vocabulary.size}
    if isinstance(drafter, Eagle3):
        model = Eagle3DraftModel(
            Eagle3SpeculatorConfig(
                **common,
                transformer_layer_config=layer_config(
                    drafter, window, qwen3=isinstance(drafter.layers[0].self_attn.q_norm, nn.RMSNorm)
                ),
                eagle_aux_hidden_state_layer_ids=list(drafter.target.layer_ids),
                norm_before_residual=drafter.layers[0].norm_before_residual,
                norm_before_fc=drafter.feature_norm == "joint",
                fc_norm=drafter.feature_norm == "layer",
                norm_output=drafter.norm_output,
                speculators_config=speculators_config("eagle3", drafter.num_draft_tokens),
            )
        )
    else:
        common |= {
            "transformer_layer_config": layer_config(drafter, window, qwen3=True),
            "block_size": drafter.block_size,
            "aux_hidden_state_layer_ids": list(drafter.target.layer_ids),
            "mask_token_id": drafter.target.mask_token_id,
            "sample_from_anchor": drafter.sample_from_anchor,
            "sliding_window_non_causal": window is not None and not window.causal,
        }
        if isinstance(drafter, DSpark):
            head = drafter.markov_head
            model = DSparkDraftModel(
                DSparkSpeculatorConfig(
                    **common,
                    markov_rank=head.rank if head else 0,
                    markov_head_type=head.kind if head else "vanilla",
                    enable_confidence_head=drafter.confidence_head is not None,
                    confidence_head_with_markov=head is not None,
                    speculators_config=speculators_config("dspark", drafter.num_draft_tokens),
                )
            )
        elif isinstance(drafter, DFlash2):
            model = DFlash2DraftModel(
                DFlash2SpeculatorConfig(
                    **common,
                    **{key: getattr(drafter, key) for key in format_of(DFlash2).own_keys},
                    speculators_config=speculators_config("dflash2", drafter.num_draft_tokens),
                )
            )
        else:
            model = DFlashDraftModel(
                DFlashSpeculatorConfig(
                    **common, speculators_config=speculators_config("dflash", drafter.num_draft_tokens)
                )
            )
    head = drafter.target_head
    state = {
        **drafter.state_dict(),
        "embed_tokens.weight": head.embedding,
        "lm_head.weight": drafter.draft_rows,
        "verifier_lm_head.weight": drafter.draft_rows,
        "verifier_norm.weight": head.norm_weight,
    }
    if not drafter.vocabulary.is_full:
        state |= {"t2d": drafter.vocabulary.t2d, "d2t": drafter.vocabulary.d2t}
    model.load_state_dict(state, strict=True)
    return model.to(drafter.device).train()


def loss_config(drafter: Drafter) -> dict[str, Any]:
    weights = {TERMS[name]: weight for name, weight in drafter.objective.active.items() if name in TERMS}
    return resolve_loss_config(json.dumps(weights), "fused" if drafter.device.type == "cuda" else "eager")


def run_blocks(model: nn.Module, drafter: BlockDrafter, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    """(loss, metrics) of one row, with our anchors."""
    anchors = drafter.anchors(batch)
    chosen = (anchors, torch.ones_like(anchors, dtype=torch.bool))
    with patch.object(dflash_core, "select_anchors", lambda *_: chosen):
        return _run_blocks(model, drafter, batch, num_anchors=len(anchors))


def _run_blocks(
    model: nn.Module, drafter: BlockDrafter, batch: Batch, *, num_anchors: int
) -> tuple[Tensor, dict[str, Any]]:
    weighting, decay = drafter.objective.weighting, drafter.objective.decay
    active = drafter.objective.active
    extra = {
        DSpark: {"tv_loss_fn": tv_loss, "confidence_head_alpha": active.get("confidence", 0.0)},
        DFlash2: {"tv_loss_fn": tv_loss, "selector_loss_alpha": active.get("selector", 0.0)},
    }
    _, loss, metrics = model(
        hidden_states=batch.hidden_states.flatten(2),
        input_ids=batch.token_ids,
        loss_mask=batch.loss_mask,
        verifier_last_hidden_states=batch.last_hidden_state,
        document_ids=batch.document_ids,
        position_ids=batch.position_ids,
        loss_config=loss_config(drafter),
        max_anchors=num_anchors,
        per_position_loss_weight="dpace" if weighting == "dpace" else "fixed-exp-decay",
        **({"dpace_alpha": decay} if weighting == "dpace" else {"gamma": decay}),
        **extra.get(type(drafter), {}),
    )
    return loss, metrics


def run_chains(
    model: nn.Module, drafter: Eagle3, samples: Sequence[TargetSample], row_tokens: int
) -> tuple[Tensor, dict[str, Any]]:
    """(loss, metrics) of one row. Their ``shift_batch`` drops each document's first token and last feature, then packs."""

    def packed(parts: list[Tensor], padding: int = 0) -> Tensor:
        joined = torch.cat(parts)
        fill = joined.new_full((row_tokens - len(joined), *joined.shape[1:]), padding)
        return torch.cat([joined, fill])[None]

    _, loss, metrics = model(
        hidden_states=packed([sample.hidden_states[:-1].flatten(1) for sample in samples]),
        input_ids=packed([sample.token_ids[1:] for sample in samples]),
        document_ids=packed([torch.full_like(s.token_ids[1:], n) for n, s in enumerate(samples)], padding=-1),
        loss_mask=packed([sample.loss_mask[1:] for sample in samples]),
        position_ids=packed([torch.arange(1, len(s.token_ids), device=s.token_ids.device) for s in samples]),
        verifier_last_hidden_states=packed([sample.last_hidden_state[1:] for sample in samples]),
        ttt_steps=drafter.ttt_steps,
        ttt_step_loss_decay=drafter.objective.decay,
        loss_config=loss_config(drafter),
    )
    return loss, metrics
