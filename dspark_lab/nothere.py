"""What a run needs and this machine does not have: a clear statement and exit code 3, not an error."""

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_CODE = 3


@dataclass(frozen=True, slots=True)
class Missing:
    """One thing that is not here, and what to do about it."""

    what: str
    mend: str


class NotHere(Exception):
    """``what`` cannot be done on this machine. ``__main__`` prints the message and exits with ``EXIT_CODE``."""

    def __init__(self, what: str, missing: Sequence[Missing]) -> None:
        lines = [f"{what} cannot run on this machine. Missing:"]
        lines += [f"  - {entry.what}\n    mend: {entry.mend}" for entry in missing]
        super().__init__("\n".join(lines))
        self.missing = tuple(missing)
