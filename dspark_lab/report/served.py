"""``serve.json`` of a run: what the engine did at each number of draft tokens and concurrency."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SERVED_FILE = "serve.json"
INTERPRETED = "Triton's kernels were interpreted on the CPU"


@dataclass(frozen=True, slots=True)
class ServedPoint:
    """One combination, measured. ``num_draft_tokens`` 0: no drafter. ``undefined``: why the speeds are None."""

    num_draft_tokens: int | Literal["adaptive"]
    concurrency: int
    acceptance_length: float | None
    tokens_per_s: float | None
    tokens_per_s_per_user: float | None
    time_to_first_token_s: float | None
    engine: str = ""
    undefined: str | None = None

    @property
    def scheme(self) -> str:
        return f"{self.num_draft_tokens} draft tokens" if self.num_draft_tokens else "no drafter"

    def __str__(self) -> str:
        known = {
            "acceptance length {:.3f}": self.acceptance_length,
            "{:.1f} tokens/s": self.tokens_per_s,
            "{:.1f} tokens/s per user": self.tokens_per_s_per_user,
            "{:.3f} s to the first token": self.time_to_first_token_s,
        }
        told = [text.format(value) for text, value in known.items() if value is not None]
        why = f" (no speed: {self.undefined})" if self.undefined else ""
        return f"{self.scheme}, concurrency {self.concurrency}: {', '.join(told)}{why}"


def read_served(folder: Path) -> tuple[ServedPoint, ...]:
    """Empty where nothing was served. ValueError for a file that is none of ours."""
    path = folder / SERVED_FILE
    if not path.exists():
        return ()
    try:
        return tuple(ServedPoint(**point) for point in json.loads(path.read_text(encoding="utf-8")).get("frontier", ()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not readable as what an engine did: {error}") from error
