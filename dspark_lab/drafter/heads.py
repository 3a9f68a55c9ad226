"""DSpark's two small heads (Cheng et al. 2026, sections 3.1-3.2)."""

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """Low-rank bias on the draft logits from the previous token: z_k = U_k + W2 W1[x_{k-1}] (equation 5).

    ``markov_w1`` is looked up with target ids, ``markov_w2`` puts out draft ids. Initialised so small (0.02) that training
    starts from the pure block drafter.
    """

    def __init__(self, *, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def forward(self, previous_token_ids: Tensor) -> Tensor:
        """[...] target ids -> [..., V_d]."""
        return self.markov_w2(self.markov_w1(previous_token_ids))


class ConfidenceHead(nn.Module):
    """Logit of the probability that a slot is accepted given its prefix, from [h_k ; W1[x_{k-1}]] (equation 7)."""

    def __init__(self, *, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, hidden: Tensor, previous_embeddings: Tensor) -> Tensor:
        """[..., H] and [..., r] -> [...]."""
        return self.proj(torch.cat([hidden, previous_embeddings], dim=-1)).squeeze(-1)
