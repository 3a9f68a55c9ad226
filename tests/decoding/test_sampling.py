from collections import Counter

import pytest
import torch
from toy_language import chi_square_p_value, one_thread  # noqa: F401
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dspark_lab.decoding.sampling import draw, probabilities, prompt_generator
from dspark_lab.records import Sampling

LOGITS = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=0.0), [0, 0, 0, 1]),
        (Sampling(temperature=1.0), [0.1, 0.2, 0.3, 0.4]),
        (Sampling(temperature=0.5), [0.01 / 0.3, 0.04 / 0.3, 0.09 / 0.3, 0.16 / 0.3]),
        (Sampling(temperature=1.0, top_k=2), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(temperature=1.0, top_k=9), [0.1, 0.2, 0.3, 0.4]),
        (Sampling(temperature=1.0, top_p=0.65), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(temperature=1.0, top_p=0.01), [0, 0, 0, 1]),
        (Sampling(temperature=1.0, top_p=1e-9), [0, 0, 0, 1]),
        # Top-p sees what top-k left: of 3/7 and 4/7, the larger alone has the mass.
        (Sampling(temperature=1.0, top_k=2, top_p=0.55), [0, 0, 0, 1]),
    ],
)
def test_golden_distributions(sampling, expected):
    torch.testing.assert_close(probabilities(LOGITS, sampling), torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.5])
@pytest.mark.parametrize("top_k", [0, 1, 20])
@pytest.mark.parametrize("top_p", [0.2, 0.95, 1.0])
def test_equals_the_warpers_of_transformers(temperature, top_k, top_p):
    logits = 3 * torch.randn(5, 50, generator=torch.Generator().manual_seed(3))
    logits[0, :4] = logits[0].max()  # ties at the top
    warped = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    ours = probabilities(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(ours, warped.softmax(-1), rtol=0, atol=1e-7)


def test_is_fp32_and_leaves_the_logits_alone():
    logits = torch.randn(2, 3, 7).bfloat16()
    before = logits.clone()
    for sampling in (Sampling(), Sampling(temperature=0.7, top_k=3, top_p=0.8)):
        p = probabilities(logits, sampling)
        assert p.dtype == torch.float32 and p.shape == logits.shape
        torch.testing.assert_close(p.sum(-1), torch.ones(2, 3))
    assert torch.equal(logits, before)


def test_draws_follow_the_distribution():
    p = torch.tensor([0.5, 0.0, 0.2, 0.3])
    tokens = draw(p.expand(4000, 4), torch.Generator().manual_seed(0)).tolist()
    assert chi_square_p_value(Counter(tokens), dict(enumerate(p.tolist()))) > 1e-3
    assert chi_square_p_value(Counter(tokens), dict(enumerate([0.45, 0.0, 0.25, 0.3]))) < 1e-3  # the test can fail


def test_draw_keeps_the_leading_shape():
    p = torch.eye(5)[torch.tensor([[3, 1, 4], [0, 2, 2]])]
    assert draw(p).tolist() == [[3, 1, 4], [0, 2, 2]]
    assert draw(p[0, 0]).shape == ()


def test_prompt_generators_depend_on_seed_and_prompt_only():
    def numbers(seed, prompt_id):
        return torch.rand(4, generator=prompt_generator(seed, prompt_id)).tolist()

    assert numbers(1, "a") == numbers(1, "a")
    assert len({tuple(numbers(seed, prompt_id)) for seed in (1, 2) for prompt_id in "ab"}) == 4
