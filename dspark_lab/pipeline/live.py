"""Live data from the config: what it needs, and the client of the engine that captures."""

import json
import socket
from collections.abc import Callable, Mapping, Sequence

from omegaconf import DictConfig

from dspark_lab.capture.client import CaptureClient
from dspark_lab.data.corpus import Corpus
from dspark_lab.data.live import LiveData, LiveRecipe
from dspark_lab.data.window import Window
from dspark_lab.nearby import DIRECT
from dspark_lab.records import TokenizedConversation, content_hash
from dspark_lab.run import Run
from dspark_lab.store.mooncake_admin import room
from dspark_lab.store.mooncake_client import MooncakeClient
from dspark_lab.store.protocol import HiddenStateStore, Manifest

SHARE_OF_FREE = 0.8  # of the segments: Mooncake begins to evict at 90 %


def check_live(config: DictConfig, choices: Mapping[str, str], corpus: Corpus, recipe: LiveRecipe, *, num_ranks: int):
    """Raises ValueError for settings of data, store and live that contradict each other, with the mend."""
    in_mooncake = choices["store"] == "mooncake"
    if in_mooncake and num_ranks > 1 and config.store.generation is None:
        raise ValueError(
            f"store=mooncake in one of {num_ranks} ranks that were not started by this pipeline: give all of them the same "
            "store.generation, else each would remove what the others have put"
        )
    if in_mooncake and corpus.num_workers:
        raise ValueError(
            f"data.num_workers={corpus.num_workers} with store=mooncake: a forked worker cannot use Mooncake, whose threads "
            "are gone in it, and live data has a thread of its own. Set data.num_workers=0."
        )
    if corpus.source == "stored":
        if in_mooncake and config.store.keep is not None:
            raise ValueError(
                f"store.keep={config.store.keep} has no effect with data.source=stored: use store=disk, or data.source=live"
            )
        return
    if not in_mooncake:
        raise ValueError(
            f"data.source=live with store={choices['store']}: live samples travel through Mooncake. Set store=mooncake, and "
            "store.keep=disk to keep them on disk too"
        )
    if config.store.keep not in (None, "disk"):
        raise ValueError(f"store.keep={config.store.keep}: null, or disk")
    if recipe.url is None:
        raise ValueError(
            "data.source=live needs an engine that captures: live.url=http://host:port of a vLLM server with our connector "
            "(docs/capture_and_stores.md)"
        )


def connect(config: DictConfig, recipe: LiveRecipe, run: Run, *, manifest: Manifest, generation: str) -> CaptureClient:
    """A client of the engine. The process that began ``generation`` removes what earlier ones of the run left.

    Raises ValueError when no engine answers, MasterUnreachableError.
    """
    try:
        with DIRECT.open(f"{recipe.url}/v1/models", timeout=recipe.timeout_s) as reply:
            model = json.load(reply)["data"][0]["id"]
    except OSError as error:
        raise ValueError(f"live.url={recipe.url}: no engine answers there ({error})") from error
    place = config.store
    mooncake = MooncakeClient(
        master_address=place.master_address,
        protocol=place.protocol,
        rdma_devices=place.rdma_devices,
        local_hostname=place.local_hostname,
    )
    client = CaptureClient(
        mooncake,
        admin_url=place.admin_url,
        # The run's folder is locked, so its path on this host has one owner at a time.
        namespace=f"live-{content_hash([socket.gethostname(), str(run.directory.resolve())])}",
        generation=generation,
        url=str(recipe.url),
        model=model,
        manifest=manifest,
        concurrency=recipe.concurrency,
        timeout_s=recipe.timeout_s,
    )
    if place.generation is None:
        client.remove_orphans()
    return client


def live_data(
    client: CaptureClient,
    conversations: Sequence[TokenizedConversation],
    *,
    recipe: LiveRecipe,
    kept: Callable[[], HiddenStateStore] | None,
) -> LiveData:
    """With the window that the config asks for, or that the segments have room for.

    Raises ValueError when they have less.
    """
    free = room(client.admin_url).free_bytes
    num_bytes = recipe.window_bytes if recipe.window_bytes is not None else int(SHARE_OF_FREE * free)
    if num_bytes > free:
        raise ValueError(
            f"live.window_bytes={num_bytes:,}: the segments have {free:,} bytes free. Give them more memory, or ask for less"
        )
    by_key = {conversation.key: conversation for conversation in conversations}
    return LiveData(client, by_key, recipe, Window(recipe.window_samples, num_bytes), kept)
