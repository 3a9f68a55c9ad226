"""Progress bars with elapsed time and ETA, and the one console that everything prints to."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console(soft_wrap=True)


def bar() -> Progress:
    """A rich progress display; tasks may carry a ``note`` that is shown at the end of their line."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def track(items: Iterable[Any], description: str, *, total: int | None = None) -> Iterator[Any]:
    """Iterate under a progress bar; ``total`` defaults to the length of ``items``."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # pyright: ignore[reportArgumentType]
    with bar() as progress:
        task = progress.add_task(description, total=total, note="")
        for item in items:
            yield item
            progress.advance(task)
