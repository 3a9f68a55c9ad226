"""What moves a slot's logits, to the bit: exactly what it may see. Every token and state is perturbed, one at a time."""

from dataclasses import replace

import pytest
import torch
from tiny_world import DRAFTERS, ROW_TOKENS, VARIANTS, build, logits_of, tiny_batch
from torch import Tensor

from dspark_lab.drafter.base import Drafter
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.drafter.eagle3 import Eagle3
from dspark_lab.records import Batch


def sees(drafter: Drafter, field: str, origin: int, k: int, j: int, start: int) -> bool:
    """Whether slot or step ``k`` at ``origin`` (anchor or slot) sees token or state ``j`` of a document from ``start``."""
    if isinstance(drafter, Eagle3):
        return start + 1 <= j <= origin + 1 + k if field == "token_ids" else start <= j <= origin
    if field == "hidden_states":
        return start <= j < origin
    # Tokens before an anchor are known only through their states; the one before a slot to a head of the drafter's own.
    knows_order = type(drafter).head is not Drafter.head
    return j == origin or (knows_order and j == origin + k)


def origins(drafter: Drafter, batch: Batch) -> list[int]:
    if isinstance(drafter, Eagle3):
        return drafter.chains(batch)[0].tolist()
    assert isinstance(drafter, BlockDrafter)
    return drafter.anchors(batch).tolist()


@torch.no_grad()
def logits(drafter: Drafter, batch: Batch) -> Tensor:
    return logits_of(drafter, drafter(batch))


def perturbed(batch: Batch, field: str, index: int) -> Batch:
    changed = getattr(batch, field).clone()
    place = divmod(index, ROW_TOKENS)
    changed[place] = (changed[place] + 1) % 28 if field == "token_ids" else changed[place] + 3.0
    return replace(batch, **{field: changed})


@pytest.mark.parametrize("name", [*DRAFTERS, *VARIANTS])
@pytest.mark.parametrize("field", ["token_ids", "hidden_states"])
def test_logits_move_with_what_a_slot_sees_and_with_nothing_else(name: str, field: str):
    drafter, batch = build(name), tiny_batch()
    starts = (torch.arange(batch.token_ids.numel()) - batch.position_ids.flatten()).tolist()
    with torch.no_grad():
        output = drafter(batch)
    base, supervised, found = logits(drafter, batch), output.supervised, origins(drafter, batch)
    assert len(found) == len(base) > 8
    counts = [0, 0]
    for j in range(batch.token_ids.numel()):
        moved = (logits(drafter, perturbed(batch, field, j)) != base).any(-1)
        expected = torch.tensor(
            [[sees(drafter, field, origin, k, j, starts[origin]) for k in range(base.shape[1])] for origin in found]
        )
        assert torch.equal(moved & supervised, expected & supervised), f"{field} at {j}"
        counts[0] += int((expected & supervised).sum())
        counts[1] += int((~expected & supervised).sum())
    assert min(counts) > 10


@pytest.mark.parametrize("name", [*DRAFTERS, *VARIANTS])
def test_last_hidden_states_teach_and_are_never_seen(name: str):
    drafter, batch = build(name), tiny_batch()
    other = replace(batch, last_hidden_state=batch.last_hidden_state + 1.0)
    assert torch.equal(logits(drafter, other), logits(drafter, batch))
    assert (drafter(other).teacher_hidden != drafter(batch).teacher_hidden).all()
