"""Small values agreed on by all ranks.

Lightning's ``strategy.reduce`` is not used for what happens every step: it puts a barrier before each reduction.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of ``values`` of all ranks, on each; itself where there is one process."""
    if dist.is_available() and dist.is_initialized():
        values = values.clone()
        dist.all_reduce(values)
    return values


def any_rank(value: bool, *, device: torch.device) -> bool:
    """Whether ``value`` is True on any rank."""
    return bool(sum_over_ranks(torch.tensor(value, dtype=torch.int32, device=device)))


def all_texts(text: str) -> list[str]:
    """The texts of all ranks, on each. For what is said at the end of a run: it pickles."""
    if not (dist.is_available() and dist.is_initialized()):
        return [text]
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts
