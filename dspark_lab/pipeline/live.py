"""The data plane of live training from the config: its window."""

from collections.abc import Callable, Sequence

from dspark_lab.capture.client import CaptureClient
from dspark_lab.data.live import LiveData, LiveRecipe
from dspark_lab.data.window import Window
from dspark_lab.records import TokenizedConversation
from dspark_lab.store.protocol import HiddenStateStore

SHARE_OF_FREE = 0.8  # of the segments: Mooncake begins to evict at 90 %


def live_data(
    client: CaptureClient,
    conversations: Sequence[TokenizedConversation],
    *,
    recipe: LiveRecipe,
    free_bytes: int,
    kept: Callable[[], HiddenStateStore] | None,
) -> LiveData:
    """With the window that the config asks for, or that the segments, of which ``free_bytes`` are free, have room for.

    Raises ValueError when they have less.
    """
    num_bytes = recipe.window_bytes if recipe.window_bytes is not None else int(SHARE_OF_FREE * free_bytes)
    if num_bytes > free_bytes:
        raise ValueError(
            f"live.window_bytes={num_bytes:,}: the segments have {free_bytes:,} bytes free. Give them more memory, "
            "or ask for less"
        )
    by_key = {conversation.key: conversation for conversation in conversations}
    return LiveData(client, by_key, recipe, Window(recipe.window_samples, num_bytes), kept)
