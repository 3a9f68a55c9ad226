"""Live data: an engine captures the training samples while training goes on. What it is made of, and what may fail."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dspark_lab.capture.protocol import Reason, SampleSource
from dspark_lab.data.window import Window
from dspark_lab.records import TokenizedConversation
from dspark_lab.signals import Requeue
from dspark_lab.store.protocol import HiddenStateStore
from dspark_lab.validation import checked

LEAST_COUNTED = 100  # samples; before there are as many, a lost one is less than its share


class LiveDataError(RuntimeError):
    """Too little of what the engine delivers can be trained on. All ranks raise it at the same step."""


class LiveInterrupted(Requeue):
    """A signal came while training waited for samples. All ranks raise it at the same step."""


class LiveRecipe:
    """What may be under way, and what may fail.

    Args:
        window_samples: Asked for and not used yet, of all ranks together; ``window_bytes`` of their payloads.
        num_retries: How often a sample is asked for again before its place is masked.
        engine_deadline_s: How long the engine may be gone.
        max_lost_share: Of the samples so far; more masked ones, or more than ``max_lost_in_a_row``, end the training.
    """

    @checked
    def __init__(
        self,
        *,
        window_samples: int,
        window_bytes: int | None,
        num_retries: int,
        engine_deadline_s: float,
        max_lost_share: float,
        max_lost_in_a_row: int,
    ) -> None:
        if num_retries < 0 or max_lost_in_a_row < 0 or not 0 <= max_lost_share <= 1:
            raise ValueError(
                f"num_retries={num_retries} (>= 0), max_lost_in_a_row={max_lost_in_a_row} (>= 0) and "
                f"max_lost_share={max_lost_share} (in [0, 1]): one of them is out of its range"
            )
        self.window_samples, self.window_bytes = window_samples, window_bytes
        self.num_retries, self.engine_deadline_s = num_retries, engine_deadline_s
        self.max_lost_share, self.max_lost_in_a_row = max_lost_share, max_lost_in_a_row


@dataclass(frozen=True, slots=True)
class LiveData:
    """Where live samples come from. ``kept`` makes a store that is asked first and takes what passes by, one for the
    capture thread alone."""

    source: SampleSource
    conversations: Mapping[str, TokenizedConversation]
    recipe: LiveRecipe
    window: Window  # of all ranks together
    kept: Callable[[], HiddenStateStore] | None = None


@dataclass(slots=True)
class LiveCounts:
    """Of one rank. ``waiting``: samples asked for and not in a batch yet; ``reused``: found in the kept store."""

    generated: int = 0
    used: int = 0
    regenerated: int = 0
    reused: int = 0
    lost: int = 0
    waiting: int = 0
    rejected: Counter[Reason] = field(default_factory=Counter)
