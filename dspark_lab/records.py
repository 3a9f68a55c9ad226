"""The frozen dataclasses that cross folders. Shapes use the letters of ``docs/algorithms.md``:

T tokens of one sequence, L captured layers, H hidden size, R rows of a batch, N = R x row_tokens tokens of a batch,
K drafted tokens of one proposal, V target vocabulary, V_d draft vocabulary.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn from logits: divide by ``temperature`` (0 = greedy), keep ``top_k`` (0 = all), then ``top_p``."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 160

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"temperature={self.temperature} (>= 0), top_k={self.top_k} (>= 0), top_p={self.top_p} (in (0, 1]) and "
                f"max_new_tokens={self.max_new_tokens} (>= 1): one of them is out of its range"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def same_distribution(self, other: "Sampling") -> bool:
        """Whether both draw from the same next-token distribution (the length limit does not matter)."""
        if self.greedy or other.greedy:
            return self.greedy and other.greedy
        return (self.temperature, self.top_k, self.top_p) == (other.temperature, other.top_k, other.top_p)


Message = Mapping[str, Any]
"""One chat message: ``role`` and ``content``; ``reasoning_content`` where the template knows thinking blocks."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a chat. A *prompt* ends with a user turn; a *regenerated* conversation also carries the target's answer.

    ``answer_token_ids`` are the very ids that the target drew, end-of-turn token included when it stopped by itself; they
    are never re-tokenised from text. ``sampling`` records how they were drawn; ``finish`` is "stop" or "length".
    ``source`` names the part of a mixture that the conversation came from.
    """

    id: str
    messages: tuple[Message, ...]
    domain: str = "default"
    answer_token_ids: tuple[int, ...] | None = None
    sampling: Sampling | None = None
    finish: str | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class TokenizedConversation:
    """Token ids and the assistant-only loss mask, both [T]; T >= 1."""

    id: str
    token_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T]: True where the token was written by the assistant
    domain: str = "default"
    sampling: Sampling | None = None
    source: str = ""

    def __len__(self) -> int:
        return int(self.token_ids.numel())

    @property
    def key(self) -> str:
        """Content address of the sample: ids and mask, so that equal content is captured once."""
        digest = hashlib.sha256(self.token_ids.to(torch.int32).numpy().tobytes())
        digest.update(self.loss_mask.to(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class TargetSample:
    """What the target knows about one conversation.

    ``hidden_states[t, l]`` is the residual stream *entering* decoder layer ``layer_ids[l]`` at token t (transformers'
    ``hidden_states[i]``; never normed); ``last_hidden_state`` is the one after the last layer, before the final norm.
    """

    token_ids: Tensor  # int64 [T]
    loss_mask: Tensor  # bool [T]
    hidden_states: Tensor  # [T, L, H]
    last_hidden_state: Tensor  # [T, H]

    @property
    def num_bytes(self) -> int:
        tensors = (self.token_ids, self.loss_mask, self.hidden_states, self.last_hidden_state)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """A target as data. ``layer_ids`` follow the entering-layer convention (see ``TargetSample``).

    ``fingerprint`` identifies the weights (hash of the files or hub revision), ``template_hash`` tokenizer and template.
    """

    name: str
    model: str
    revision: str
    fingerprint: str
    template_hash: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any]
    layer_ids: tuple[int, ...]
    mask_token_id: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows of several documents. Everything is [R, row_tokens] (+ [L, H] / [H]); padding has document id -1.

    A document is one conversation; its id is unique in the batch, its tokens are contiguous in one row, and
    ``position_ids`` restart at 0 in each. ``row_ids`` name the rows independently of ranks and workers: together with
    ``epoch`` and the seed they key every random choice made about the row.
    """

    token_ids: Tensor  # int64 [R, row_tokens]
    loss_mask: Tensor  # bool [R, row_tokens]
    document_ids: Tensor  # int64 [R, row_tokens]
    position_ids: Tensor  # int64 [R, row_tokens]
    hidden_states: Tensor  # [R, row_tokens, L, H]
    last_hidden_state: Tensor  # [R, row_tokens, H]
    row_ids: tuple[int, ...]
    epoch: int = 0
    keys: tuple[str, ...] = ()  # of the samples inside

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to a document."""
        return int((self.document_ids >= 0).sum())

    @property
    def num_supervised_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        return self._map(Tensor.pin_memory)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(
            self,
            token_ids=fn(self.token_ids),
            loss_mask=fn(self.loss_mask),
            document_ids=fn(self.document_ids),
            position_ids=fn(self.position_ids),
            hidden_states=fn(self.hidden_states),
            last_hidden_state=fn(self.last_hidden_state),
        )


ConfidenceSource = Literal["head", "probability"]
"""What stands for confidences: those of the drafter's head, or the largest probability of each slot's distribution."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafter's offer of K tokens after an anchor; ``propose`` gives that of R sequences, with R before every shape here.

    ``probabilities`` [K, V] is the distribution each token was drawn from, over *target* ids (tokens outside the draft
    vocabulary have 0); None when the tokens are arg-maxima (a one-hot distribution). ``confidence`` [K]: probability that
    slot k is accepted given its prefix; None for a drafter without a confidence head. ``top_probability`` [K]: the largest
    one of the distribution of slot k (of the softmax where the tokens are arg-maxima), which knows no draft but the earlier
    ones.
    """

    token_ids: Tensor  # int64 [K], target ids
    probabilities: Tensor | None = None
    confidence: Tensor | None = None
    top_probability: Tensor | None = None

    def __getitem__(self, row: int) -> "Proposal":
        """That of one of R sequences."""
        told = (self.token_ids, self.probabilities, self.confidence, self.top_probability)
        return Proposal(*(None if each is None else each[row] for each in told))  # pyright: ignore[reportArgumentType]

    def confidence_by(self, source: ConfidenceSource | None) -> Tensor | None:
        return {"head": self.confidence, "probability": self.top_probability, None: None}[source]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verification's decision: the first ``num_accepted`` drafted tokens stand, then ``bonus_token_id`` follows."""

    num_accepted: int
    bonus_token_id: int


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """One verify step of a trace. ``position`` is the anchor's; ``num_accepted`` counts drafted tokens only.

    ``draft_token_ids`` are what was drafted, where the loop is this package's own. ``top_probability``: see ``Proposal``.
    """

    position: int
    num_draft_tokens: int
    num_accepted: int
    confidence: tuple[float, ...] | None = None
    draft_token_ids: tuple[int, ...] | None = None
    top_probability: tuple[float, ...] | None = None

    @classmethod
    def of(cls, position: int, proposal: Proposal, *, num_verified: int, num_accepted: int) -> "VerifyStep":
        """Of a proposal whose first ``num_verified`` tokens were verified."""
        told = (proposal.token_ids, proposal.confidence, proposal.top_probability)
        drafted, *estimates = (None if each is None else tuple(each[:num_verified].tolist()) for each in told)
        return cls(position, num_verified, num_accepted, estimates[0], drafted, estimates[1])

    def confidence_by(self, source: ConfidenceSource) -> tuple[float, ...] | None:
        return self.confidence if source == "head" else self.top_probability


@dataclass(frozen=True, slots=True)
class Trace:
    """All verify steps of one prompt, at full block width.

    ``token_ids`` are the new tokens, the first one from prefill; None where they are not known.
    """

    prompt_id: str
    domain: str
    steps: tuple[VerifyStep, ...]
    num_new_tokens: int
    token_ids: tuple[int, ...] | None = None

    @property
    def num_accepted(self) -> int:
        return sum(step.num_accepted for step in self.steps)

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / verify steps: mean tokens per target forward, bonus token included."""
        return 1.0 + self.num_accepted / max(len(self.steps), 1)


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured number of a run, comparable across runs. ``origin`` is measured, replayed, estimated or simulated."""

    name: str
    value: float | None
    unit: str
    origin: str
    setting: Mapping[str, Any] = field(default_factory=dict)
    num_samples: int | None = None
    low: float | None = None  # 95 % interval
    high: float | None = None


def content_hash(value: Any, length: int = 12) -> str:
    """Hash of anything JSON can write (dataclasses and tensors' lists included), independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=_plain).encode()).hexdigest()[:length]


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    return str(value)
