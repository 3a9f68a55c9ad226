"""From logits to a next-token distribution, and draws from it: one definition for target, drafters and replay."""

import torch
from torch import Tensor

from dspark_lab.records import Sampling, content_hash


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that ``sampling`` draws from, fp32 [..., V], from logits [..., V] of any float type.

    Temperature, then top-k, then top-p, each as transformers' warpers do it: ties with the k-th logit stay, top-p keeps
    the smallest set of tokens whose mass exceeds it. Temperature 0 gives the one-hot argmax.
    """
    scores = logits.float()
    if sampling.greedy:
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        smallest_kept = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
    if sampling.top_p < 1.0:
        scores = scores.masked_fill(_outside_nucleus(scores, sampling.top_p), -torch.inf)
    return scores.softmax(-1)


def _outside_nucleus(scores: Tensor, top_p: float) -> Tensor:
    """bool [..., V]: the least likely tokens whose joint mass is at most 1 - top_p; never the most likely one."""
    ascending, order = scores.sort(dim=-1)
    outside = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
    outside[..., -1] = False
    return torch.zeros_like(outside).scatter_(-1, order, outside)


def draw(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token id per distribution: [..., V] -> int64 [...]. ``generator`` lives on the probabilities' device."""
    rows = probabilities.reshape(-1, probabilities.shape[-1])
    return torch.multinomial(rows, 1, generator=generator).reshape(probabilities.shape[:-1])


def prompt_generator(seed: int, prompt_id: str, device: torch.device | str = "cpu") -> torch.Generator:
    """Random numbers of one prompt: the same whatever other prompts a run holds, and in whatever order."""
    return torch.Generator(device).manual_seed(int(content_hash([seed, prompt_id]), 16))
