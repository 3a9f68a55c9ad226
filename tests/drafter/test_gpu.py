"""The CUDA paths on the hardware that they are written for: flex attention, and a whole step of every drafter."""

import pytest
import torch
from benchmark import DRAFTERS, Shape, batch_of, drafter_of

from dspark_lab.drafter.attention import Visibility, attend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]


def test_flex_attention_equals_the_chunked_one_forward_and_backward() -> None:
    torch.manual_seed(0)
    num_context, num_queries, group = 300, 96, 8
    anchors = torch.arange(20, 20 + 12 * 20, 20).repeat_interleave(group)
    shapes = ((num_queries, 4), (num_context, 2), (num_context, 2), (num_queries, 2), (num_queries, 2))
    inputs = [torch.randn(*shape, 64) for shape in shapes]

    def run(device: str) -> list[torch.Tensor]:
        query, key, value, own_key, own_value = (t.to(device).requires_grad_() for t in inputs)
        visibility = Visibility((anchors - 20).to(device), anchors.to(device), group)
        out = attend(query, (key, value), [(own_key, own_value)], visibility)
        gradients = torch.autograd.grad(out.square().sum(), (query, key, value, own_key, own_value))
        return [tensor.cpu() for tensor in (out, *gradients)]

    for ours, theirs in zip(run("cuda"), run("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("draft_vocabulary", [512, 128])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_step_has_the_loss_and_the_gradients_of_the_cpu(name: str, draft_vocabulary: int) -> None:
    shape = Shape(
        hidden=128, vocabulary=512, heads=4, key_heads=2, row=600, anchors=16, draft_vocabulary=draft_vocabulary
    )

    def run(device: str) -> dict[str, torch.Tensor]:
        drafter, batch = drafter_of(name, shape, chunk=64).to(device), batch_of(shape).to(device)
        loss = drafter.loss(drafter(batch), batch).total
        loss.backward()
        gradients = {key: p.grad.cpu() for key, p in drafter.named_parameters() if p.grad is not None}
        return {"loss": loss.detach().cpu(), **gradients}

    ours, theirs = run("cuda"), run("cpu")
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        scale = theirs[key].abs().max()
        error = (value - theirs[key]).abs().max()
        assert error <= 2e-3 * scale, f"{key}: error {float(error):.3g} at scale {float(scale):.3g}"
