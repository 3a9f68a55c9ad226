"""Published acceptance lengths beside ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from dspark_lab.evaluation.acceptance import acceptance_metrics
from dspark_lab.evaluation.gate import TOLERANCE
from dspark_lab.records import Trace
from dspark_lab.validation import checked


class Published:
    """Acceptance lengths (bonus token included) by the domain of the prompts, and where they stand."""

    @checked
    def __init__(self, *, source: str, acceptance_length: Mapping[str, float]) -> None:
        self.source, self.acceptance_length = source, acceptance_length


@dataclass(frozen=True, slots=True)
class Beside:
    """One domain: ours with its 95 % interval, and what was published."""

    domain: str
    ours: float
    low: float
    high: float
    published: float
    num_prompts: int

    @property
    def agrees(self) -> bool:
        """Within the joint interval, or by less than 1 %.

        Papers give no intervals: theirs is taken to be as wide as ours, of as many prompts.
        """
        difference = self.published - self.ours
        reach = sqrt(2) * (self.high - self.ours if difference > 0 else self.ours - self.low)
        return abs(difference) <= max(reach, TOLERANCE * self.published)

    def __str__(self) -> str:
        word = "agree" if self.agrees else "disagree"
        return (
            f"{self.domain}: ours {self.ours:.2f} [{self.low:.2f}, {self.high:.2f}] of {self.num_prompts} prompts, "
            f"published {self.published:.2f}: {word}"
        )


def compare_published(traces: Sequence[Trace], published: Published, *, seed: int) -> list[Beside]:
    """In the order of the published domains.

    Raises:
        ValueError: a published domain has no prompt among ours, or none that was drafted for.
    """
    found = []
    for domain, length in published.acceptance_length.items():
        ours = [trace for trace in traces if trace.domain == domain]
        if not any(trace.steps for trace in ours):
            known = ", ".join(sorted({trace.domain for trace in traces}))
            raise ValueError(
                f"published.acceptance_length.{domain}: no prompt of that domain was decoded (only {known})"
            )
        entry = acceptance_metrics(ours, setting={}, origin="measured", seed=seed)[0]
        assert entry.value is not None and entry.low is not None and entry.high is not None
        found.append(Beside(domain, entry.value, entry.low, entry.high, length, len(ours)))
    return found
