"""Samples on their way from the servers that capture to the ranks that train: bytes, rates, and which side waits."""

from dataclasses import dataclass
from math import ceil

GB, GIB = 1e9, 2**30
IDS_BYTES = 8  # of a token, beside its states
FILL = 0.9  # of its segments Mooncake uses before it evicts
WINDOW_SHARE = 0.8  # of the segments that live capture fills when live.window_bytes is null (pipeline/live.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """What a captured token is: the states entering ``num_layers`` layers and the last one, ``hidden_size`` numbers each."""

    num_layers: int
    hidden_size: int
    number_bytes: int

    @property
    def token_bytes(self) -> int:
        return (self.num_layers + 1) * self.hidden_size * self.number_bytes

    def sample_bytes(self, num_tokens: int) -> int:
        return num_tokens * (self.token_bytes + IDS_BYTES)

    def saved_by(self, *, num_layers: int | None = None, number_bytes: int | None = None) -> float:
        """Share of the bytes that fewer layers or smaller numbers would save."""
        less = States(
            num_layers=num_layers or self.num_layers,
            hidden_size=self.hidden_size,
            number_bytes=number_bytes or self.number_bytes,
        )
        return 1 - less.token_bytes / self.token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens per second: of one set of serving nodes that captures, of one training node, of what one trainer rank reads.

    ``capture`` None: nothing captures meanwhile, or its rate is not known.
    """

    capture: float | None
    training_node: float
    client: float

    def bottleneck(self, *, num_sets: int, num_training_nodes: int, num_ranks: int) -> tuple[str, float]:
        """Which side the others wait for, and its rate."""
        sides = {"training": num_training_nodes * self.training_node, "transfers": num_ranks * self.client}
        if self.capture is not None:
            sides["capture"] = num_sets * self.capture
        slowest = min(sides, key=lambda side: sides[side])
        return slowest, sides[slowest]

    def balance(self, *, num_sets: int, num_training_nodes: int) -> dict[str, float]:
        """Whether training keeps up with capture. ``training_nodes_needed``: as many as do, at least one;
        ``flip_capture_tokens_per_s``: of a set, above which one more than planned is needed;
        ``sets_per_training_node``: that one keeps up with. Empty where the rate of capture is not known.
        """
        if self.capture is None:
            return {}
        return {
            "capture_tokens_per_s": num_sets * self.capture,
            "training_nodes_needed": max(ceil(num_sets * self.capture / self.training_node), 1),
            "flip_capture_tokens_per_s": num_training_nodes * self.training_node / num_sets,
            "sets_per_training_node": self.training_node / self.capture,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """``num_samples`` of ``sample_tokens`` each on average, of ``longest_tokens`` at most."""

    num_samples: int
    sample_tokens: float
    longest_tokens: int

    @property
    def num_tokens(self) -> float:
        return self.num_samples * self.sample_tokens


def samples_in_flight(segment_bytes: float, sample_bytes: float) -> int:
    return int(FILL * segment_bytes // sample_bytes)


def exchanged_bytes(*, num_parameters: int, num_ranks: int, sharded: bool) -> float:
    """That each rank of training sends in a step, in fp32: a ring's sum of the gradients and its result.

    ``sharded``: the sum alone, and the weights, gathered for forward and for backward.
    """
    return (3 if sharded else 2) * (num_ranks - 1) / num_ranks * 4 * num_parameters
