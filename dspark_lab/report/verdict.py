"""The answer of a comparison in a sentence or two, claiming no more than seeds and prompts allow."""

from collections.abc import Sequence

from dspark_lab.records import Metric
from dspark_lab.report.algorithms import Comparison
from dspark_lab.report.comparison import Row, row_labels
from dspark_lab.serving.frontier_file import together


def verdict(rows: Sequence[Row], compared: Sequence[Comparison] = ()) -> str:
    """The highest acceptance length, and whether that order is one of the algorithms."""
    ranked = [row for row in rows if row.acceptance is not None]
    if not ranked:
        frontiers = together([frontier for row in rows for frontier in row.run.frontiers])
        found = [f"Simulated, {frontier.title}: {' '.join(frontier.headline)}" for frontier in frontiers]
        return " ".join(found) or "No run has been evaluated yet."
    best = ranked[0]
    assert best.acceptance is not None
    how = "real decoding" if best.decode else "replay"
    how += f", {len(best.runs)} seeds" if len(best.runs) > 1 else ""
    first = f"{row_labels(rows)[rows.index(best)]}: {best.acceptance.value:.2f} tokens per target forward ({how}"
    first += ")" if best.acceptance.low is None else f", {best.acceptance.low:.2f} to {best.acceptance.high:.2f})"
    if len(ranked) == 1:
        return first + "."
    return f"{first}, the highest of {len(ranked)}.{_certainty(best, ranked[1:], compared)}"


def _certainty(best: Row, others: Sequence[Row], compared: Sequence[Comparison]) -> str:
    pairs = [
        entry for entry in compared if best.label in (entry.first, entry.second) and entry.difference.p is not None
    ]
    if not pairs:
        close = [row.label for row in others if _overlap(best.acceptance, row.acceptance)]
        return f" Its interval overlaps that of {_listed(close)}: this order is not certain." if close else ""
    rivals = {entry.second if entry.first == best.label else entry.first: entry for entry in pairs}
    beaten = [name for name, entry in rivals.items() if entry.verdict == f"{best.label} is ahead"]
    open_ = [name for name, entry in rivals.items() if entry.verdict == "undecided"]
    said = (
        f" It is ahead of {_listed(beaten)} beyond seeds and prompts (corrected for {len(compared)} pairs)."
        if beaten
        else ""
    )
    if open_:
        detectable = max(rivals[name].difference.detectable or 0.0 for name in open_)
        said += f" Against {_listed(open_)} it is undecided: differences below {detectable:.2f} could not be found."
    return said


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)


def _overlap(one: Metric | None, other: Metric | None) -> bool:
    if one is None or other is None or None in (one.low, one.high, other.low, other.high):
        return False
    return one.low <= other.high and other.low <= one.high  # type: ignore[operator]
