"""Rows of 16,384 tokens: what a slot is, it is wherever its document stands in the row, and a step trains on it."""

import pytest
import torch
from tiny_world import assert_close, build, document, pack

from dspark_lab.drafter.layers import SlidingWindow

ROW_TOKENS = 16384
LENGTHS = (9000, 5001, 2300)  # the rest is padding
WINDOW = SlidingWindow(tokens=64, origin="query", causal=True, full_layers=())


def masked(length: int) -> str:
    """A long prompt, a short answer at the end: few slots, far into the row."""
    return "0" * (length - 40) + "1" * 40


@pytest.mark.parametrize(("name", "options"), [("eagle3", {}), ("dspark", {"num_anchors": 200})])
def test_a_document_far_into_a_long_row_is_what_it_is_alone(name: str, options: dict) -> None:
    drafter = build(name, window=WINDOW, **options)
    samples = [document(masked(length), seed=seed) for seed, length in enumerate(LENGTHS)]
    batch = pack([samples], row_tokens=ROW_TOKENS)
    packed = drafter(batch)
    alone = [drafter(pack([[sample]], row_tokens=len(sample.token_ids))) for sample in samples]
    found, expected = (
        [states[supervised] for states, supervised in outputs]
        for outputs in ([(packed.hidden, packed.supervised)], [(part.hidden, part.supervised) for part in alone])
    )
    assert len(found[0]) >= 3 * 36
    assert_close(found[0], torch.cat(expected))
    drafter.loss(packed, batch).total.backward()
    gradients = [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]
    assert gradients and all(bool(grad.isfinite().all()) for grad in gradients)
