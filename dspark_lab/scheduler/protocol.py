"""Who decides how many of a request's draft tokens are verified in the next step."""

from dataclasses import dataclass
from typing import Literal, Protocol

from dspark_lab.hardware.protocol import Floats, Ints
from dspark_lab.records import ConfidenceSource

Confidence = ConfidenceSource | Literal["acceptance"] | None
"""What a scheduler asks its caller for (``VerifyScheduler``)."""


@dataclass(frozen=True, slots=True)
class Load:
    """What else the coming step holds. ``num_context_tokens``: sum of the decoding requests' lengths.

    ``request_ids`` [R] name the requests of the rows, for schedulers that remember earlier steps.
    """

    num_requests: int
    num_prefill_tokens: int = 0
    num_context_tokens: int = 0
    request_ids: Ints | None = None


class VerifyScheduler(Protocol):
    """``draft_lengths`` of requests in the order of their rows.

    ``confidence`` [R, K] is conditional, in [0, 1]: probability that slot k is accepted given that those before it were.
    Returned are R integers in 0..K; of a request's drafted tokens always a prefix is verified. The attribute says what the
    caller is to give: *head*, the drafter's (None if it has none); *probability*, the largest one of each slot's
    distribution; *acceptance*, the truth, 1 where the slot will be accepted, else 0 (upper bounds alone); None, nothing.

    A scheduler is lossless, whatever its confidences are worth, when it decides on slot k of a request without knowing
    what was drafted in slot k or later of that request (``docs/schedulers.md``). Confidence k itself is made from the
    drafts before slot k, and so is the largest probability; confidence k + 1 is not.
    """

    @property
    def confidence(self) -> Confidence: ...

    def draft_lengths(self, confidence: Floats | None, load: Load, *, num_draft_tokens: int) -> Ints: ...
