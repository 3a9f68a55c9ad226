"""What a target can do, whatever engine runs it; and the frozen matrices that drafters borrow from it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_lab.records import Conversation, Sampling, TargetSample, TargetSpec, TokenizedConversation
from dspark_lab.target.resolve import Resolved

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class TargetHead:
    """Embedding, final norm and vocabulary matrix of the target: frozen, borrowed, never a module.

    As buffers they would be broadcast by DDP at every forward, as parameters they would enter FSDP's groups and the
    checkpoints; so they are a plain attribute of the drafter and moved by hand (``to``).
    """

    embedding: Tensor  # [V, H]
    norm_weight: Tensor  # [H]
    norm_eps: float
    lm_head: Tensor  # [V, H]; the same tensor as ``embedding`` when the target ties them

    def map(self, fn: Callable[[Tensor], Tensor]) -> "TargetHead":
        """Apply ``fn`` to each matrix; tied ones stay one tensor."""
        embedding = fn(self.embedding)
        lm_head = embedding if self.lm_head is self.embedding else fn(self.lm_head)
        return TargetHead(embedding, fn(self.norm_weight), self.norm_eps, lm_head)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "TargetHead":
        return self.map(lambda tensor: tensor.to(device, dtype))

    def embed(self, token_ids: Tensor) -> Tensor:
        """[...] ids -> [..., H]."""
        return F.embedding(token_ids, self.embedding)

    def norm(self, last_hidden_state: Tensor) -> Tensor:
        """Final norm of states taken before it, [..., H]."""
        return F.rms_norm(last_hidden_state, self.norm_weight.shape, self.norm_weight, self.norm_eps)

    def logits(self, last_hidden_state: Tensor) -> Tensor:
        """Target logits [..., V] from pre-norm states [..., H]."""
        return F.linear(self.norm(last_hidden_state), self.lm_head)


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """Of the n tokens fed: logits [n, V] (row i predicts the token after token i), states [n, L, H] and [n, H]."""

    logits: Tensor
    hidden_states: Tensor
    last_hidden_state: Tensor


class Verifier(Protocol):
    """A target with a cache for one sequence."""

    def forward(self, token_ids: Tensor) -> VerifyOutput:
        """Append ``token_ids`` [n] to the cache and return what the target says about each."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Forget the last ``num_tokens`` tokens of the cache."""
        ...


class Target(Protocol):
    @property
    def spec(self) -> TargetSpec: ...

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase": ...

    @property
    def resolved(self) -> Resolved:
        """Where its files lie."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of head and decoding."""
        ...

    def take_events(self) -> Mapping[str, int]:
        """What happened to the engine since this was last asked, by kind: what a stage's record tells."""
        ...

    def head(self) -> TargetHead: ...

    def verifier(self) -> Verifier: ...

    def regenerate(self, prompts: Sequence[Conversation], *, sampling: Sampling) -> Iterator[Conversation]:
        """Answers in the target's own words, in the order of completion. Returns when the engine is ready."""
        ...

    def capture(self, conversations: Sequence[TokenizedConversation]) -> Iterator[tuple[str, TargetSample]]:
        """(key, sample) of each conversation, in any order. Returns when the engine is ready: its start is no capture."""
        ...
