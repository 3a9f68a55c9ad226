"""The flex-attention path on the hardware that it is written for."""

import pytest
import torch

from dspark_lab.drafter.attention import Visibility, attend


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
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
