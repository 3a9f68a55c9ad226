"""DSpark's two small heads (Cheng et al. 2026, sections 3.1-3.2)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MarkovKind = Literal["vanilla", "gated", "rnn"]


class MarkovHead(nn.Module):
    """Low-rank bias on the draft logits from the previous token: z_k = U_k + W2 f(W1[x_(k-1)], h_k) (equation 5).

    *vanilla*: f is W1[x_(k-1)] itself. *gated*: that, times sigmoid(G [h_k ; W1 x]). *rnn*: tanh(o_k) of a gated recurrence
    over the slots of the block, [g ; c ; o] = J [s_(k-1) ; W1 x ; h_k], s_k = sigmoid(g) s_(k-1) + (1 - sigmoid(g)) tanh(c).
    ``markov_w1`` is looked up with target ids, ``markov_w2`` puts out draft ids.
    """

    def __init__(
        self, *, kind: MarkovKind, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int
    ) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(self, logits: Tensor, previous_token_ids: Tensor, hidden: Tensor) -> Tensor:
        """``logits`` [..., S, V_d] of whole blocks with the bias of [..., S] target ids and states [..., S, H] added."""
        features = self.features(previous_token_ids, hidden)
        # One pass over the vocabulary for product and sum.
        biased = torch.addmm(logits.flatten(0, -2), features.flatten(0, -2), self.markov_w2.weight.T)
        return biased.view(logits.shape)

    def embed(self, token_ids: Tensor) -> Tensor:
        """W1[x]: [...] target ids -> [..., r]."""
        # Sparse: a chunk of the loss touches few rows, and ``walk_chunks`` adds them up to one dense gradient. Not a flag
        # of the module: DDP would believe it and wait for a sparse one.
        return F.embedding(token_ids, self.markov_w1.weight, sparse=True)

    def features(self, previous_token_ids: Tensor, hidden: Tensor) -> Tensor:
        """f of whole blocks: [..., S, r]."""
        embedded = self.embed(previous_token_ids)
        if self.kind != "rnn":
            return self._first_order(embedded, hidden)
        outputs, state = [], None
        for k in range(embedded.shape[-2]):
            output, state = self._recur(embedded[..., k, :], hidden[..., k, :], state)
            outputs.append(output)
        return torch.stack(outputs, dim=-2)

    def step(self, previous_token_id: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot of R blocks: [R] and [R, H] -> bias [R, V_d] and the recurrence's state, None before the first slot."""
        embedded = self.embed(previous_token_id)
        if self.kind != "rnn":
            return self.markov_w2(self._first_order(embedded, hidden)), None
        output, state = self._recur(embedded, hidden, state)
        return self.markov_w2(output), state

    def _first_order(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        if self.kind == "vanilla":
            return embedded
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded

    def _recur(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        state = torch.zeros_like(embedded) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1.0 - gate) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """Logit of the probability that a slot is accepted given its prefix, from [h_k ; W1[x_(k-1)]] (equation 7)."""

    def __init__(self, *, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, features: Tensor) -> Tensor:
        """[..., H + r] (H without a Markov head) -> [...]."""
        return self.proj(features).squeeze(-1)
