"""Where blocks start, what their slots see, and what they must predict (``docs/algorithms.md``, sequence construction)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_lab.drafter.attention import Visibility
from dspark_lab.drafter.objective import Supervision
from dspark_lab.records import Batch


def supervised_pairs(batch: Batch) -> Tensor:
    """bool [N]: token i and its successor are both the assistant's, in one document.

    These are the tokens from which a drafter really drafts: at inference an anchor is always a token of the answer, and
    what follows it too.
    """
    mask, document = batch.loss_mask.flatten(), batch.document_ids.flatten()
    pairs = torch.zeros_like(mask)
    pairs[:-1] = mask[:-1] & mask[1:] & (document[:-1] == document[1:])
    return pairs


def block_candidates(batch: Batch, *, supervision: Supervision, block_size: int) -> Tensor:
    """bool [N]: tokens that may be anchors. Speculators' only need a whole block after them in the row."""
    if supervision != "speculators":
        return supervised_pairs(batch)
    candidates = batch.loss_mask.clone()
    candidates[:, -block_size:] = False
    return candidates.flatten()


def sample_anchors(batch: Batch, candidates: Tensor, *, num_anchors: int, seed: int) -> Tensor:
    """int64 [A] ascending indices into the flattened batch: up to ``num_anchors`` candidates of each row, all different.

    The draw is keyed by (seed, epoch, row), so it does not depend on ranks, workers or the rows beside it.
    """
    row_tokens = batch.token_ids.shape[1]
    candidates = candidates.view(-1, row_tokens).cpu()
    chosen = []
    for row, row_id in enumerate(batch.row_ids):
        eligible = candidates[row].nonzero().flatten()
        generator = torch.Generator().manual_seed(hash((seed, batch.epoch, row_id)) & (2**63 - 1))
        order = torch.randperm(eligible.numel(), generator=generator)[:num_anchors]
        chosen.append(eligible[order].sort().values + row * row_tokens)
    return torch.cat(chosen).to(batch.token_ids.device)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of B slots at A anchors. S predicting slots: all B if they are sampled from the anchor on, else B - 1."""

    token_ids: Tensor  # [A, B]: the anchor token, then mask tokens
    position_ids: Tensor  # [A, B]
    visibility: Visibility  # of the A * B queries
    labels: Tensor  # [A, S] target ids
    previous_token_ids: Tensor  # [A, S]: the true token before each label
    supervised: Tensor  # bool [A, S]
    teacher: Tensor  # [A, S]: index of the token whose last hidden state predicts the label


def gather_blocks(
    batch: Batch,
    anchors: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    sample_from_anchor: bool,
    supervision: Supervision,
) -> Blocks:
    """Blocks at ``anchors`` [A] (indices into the flattened batch).

    Anchor-first: slot k predicts the token k + 1 places after the anchor. 1 + N: slot 0 predicts nothing and slot k the
    token k places after the anchor (algorithms.md 0.3). Supervised is a run of slots, cut at the first label that is not
    the assistant's or of another document; by Speculators' convention every slot k whose *own* token, k places after the
    anchor, is supervised, whatever lies between (3.5).
    """
    token_ids, document = batch.token_ids.flatten(), batch.document_ids.flatten()
    position, mask = batch.position_ids.flatten(), batch.loss_mask.flatten()
    slots = torch.arange(block_size, device=anchors.device)
    inputs = torch.full((anchors.numel(), block_size), mask_token_id, device=anchors.device)
    inputs[:, 0] = token_ids[anchors]

    offsets = slots + 1 if sample_from_anchor else slots[1:]
    label = anchors[:, None] + offsets
    inside = label < token_ids.numel()
    label = label.clamp(max=token_ids.numel() - 1)
    if supervision == "speculators":
        supervised = inside & mask[label - 1 if sample_from_anchor else label]
    else:
        valid = inside & mask[label] & (document[label] == document[anchors][:, None])
        supervised = valid.cumprod(dim=1).bool()
    return Blocks(
        token_ids=inputs,
        position_ids=position[anchors][:, None] + slots,
        visibility=Visibility(
            lower=(anchors - position[anchors]).repeat_interleave(block_size),
            upper=anchors.repeat_interleave(block_size),
            group_size=block_size,
        ),
        labels=token_ids[label],
        previous_token_ids=token_ids[label - 1],
        supervised=supervised,
        teacher=label - 1,
    )
