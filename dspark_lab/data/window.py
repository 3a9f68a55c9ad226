"""How many samples may be under way between an engine and training, and how many one optimizer step needs."""

from collections.abc import Sequence
from dataclasses import dataclass

from dspark_lab.capture.protocol import payload_bytes
from dspark_lab.store.protocol import Manifest


@dataclass(frozen=True, slots=True)
class Window:
    """Samples, and bytes of their payloads."""

    num_samples: int
    num_bytes: int

    def __add__(self, other: "Window") -> "Window":
        return Window(self.num_samples + other.num_samples, self.num_bytes + other.num_bytes)

    def __sub__(self, other: "Window") -> "Window":
        return Window(self.num_samples - other.num_samples, self.num_bytes - other.num_bytes)

    def __floordiv__(self, parts: int) -> "Window":
        return Window(self.num_samples // parts, self.num_bytes // parts)

    def __mul__(self, times: int) -> "Window":
        return Window(self.num_samples * times, self.num_bytes * times)

    def holds(self, other: "Window") -> bool:
        return other.num_samples <= self.num_samples and other.num_bytes <= self.num_bytes


def longest_row(num_tokens: Sequence[int], *, row_tokens: int, manifest: Manifest) -> Window:
    """What no row of any epoch exceeds, for conversations of these lengths, however they are packed.

    A row has at most as many samples as the shortest ones that fit; a sample longer than a row is captured whole.
    """
    most, filled = 0, 0
    for length in sorted(num_tokens):
        filled += length
        if filled > row_tokens:
            break
        most += 1
    around = most * (payload_bytes(0, manifest) + 128)  # of each its checksum, and two tensors made multiples of 64
    longest = max(payload_bytes(row_tokens, manifest) + around, payload_bytes(max(num_tokens), manifest))
    return Window(max(most, 1), longest)


def check_window(window: Window, row: Window, *, rows_per_batch: int, accumulate: int, num_ranks: int) -> Window:
    """This rank's part of ``window``. Payloads are held until the optimizer step that uses them is over, so a smaller one
    than a step needs would never fill.

    Raises ValueError with the numbers.
    """
    own, need = window // num_ranks, row * (rows_per_batch * accumulate)
    if not own.holds(need):
        raise ValueError(
            "the window of live data does not hold one optimizer step, so training would wait for ever: a rank's step has "
            f"data.rows_per_batch={rows_per_batch} x trainer.accumulate={accumulate} rows of up to {row.num_samples:,} "
            f"samples and {row.num_bytes:,} bytes, together {need.num_samples:,} samples and {need.num_bytes:,} bytes; its "
            f"part of live.window_samples={window.num_samples:,} and live.window_bytes={window.num_bytes:,} is "
            f"1/{num_ranks}: {own.num_samples:,} samples and {own.num_bytes:,} bytes. Give the segments more memory and "
            "raise these, or lower data.rows_per_batch, trainer.accumulate or data.row_tokens"
        )
    return own
