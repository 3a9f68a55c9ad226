"""Progress bars with elapsed time and ETA, and the one console that everything prints to."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console(soft_wrap=True)


def track(items: Iterable[Any], description: str, *, total: int | None = None) -> Iterator[Any]:
    """Iterate under a progress bar; ``total`` defaults to the length of ``items``."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # pyright: ignore[reportArgumentType]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield from progress.track(items, total=total, description=description)
