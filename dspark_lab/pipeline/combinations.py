"""Choices of ``engine``, ``store`` and ``cluster`` that contradict each other: one table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

Rule = tuple[Callable[[Mapping[str, str], Any], bool], str]
STARTING = ("local", "slurm")  # clusters that start services
KEPT = (None, "disk")  # what store.keep may be

CONTRADICTIONS: Sequence[Rule] = (
    (
        lambda chosen, config: (
            chosen["engine"] == "vllm"
            and chosen["cluster"] == "attach"
            and not _endpoints(config)
            and bool(
                {"regenerate", "capture", *(["train"] if config.data.source == "live" else [])} & set(_stages(config))
            )
        ),
        "engine=vllm needs servers: cluster=local and cluster=slurm start them; or name those that run in engine.endpoints "
        "or engine.endpoints_file",
    ),
    (
        lambda chosen, config: chosen["engine"] == "vllm" and len(_endpoints(config)) == 2,
        "engine.endpoints and engine.endpoints_file are both given: which servers are meant? Leave one out",
    ),
    (
        lambda chosen, config: (
            chosen["engine"] == "vllm" and chosen["cluster"] in STARTING and bool(_endpoints(config))
        ),
        "cluster=local and cluster=slurm start servers of their own, but engine.endpoints or engine.endpoints_file names "
        "others: leave them out, or use cluster=attach",
    ),
    (
        lambda chosen, config: (
            chosen["cluster"] == "local" and chosen["engine"] == "huggingface" and chosen["store"] != "mooncake"
        ),
        "cluster=local has nothing to start: neither engine=huggingface nor this store needs a service. Leave it out, or "
        "choose engine=vllm or store=mooncake",
    ),
    (
        lambda chosen, config: chosen["cluster"] in STARTING and bool(_addresses(chosen, config)),
        "cluster=local and cluster=slurm start Mooncake at addresses that they choose, but some are given "
        "(cluster.mooncake, store.master_address, store.admin_url): leave them out, or use cluster=attach",
    ),
    (
        lambda chosen, config: (
            chosen["engine"] == "vllm"
            and config.engine.payload_folder is not None
            and (config.data.source == "live" or chosen["cluster"] == "slurm")
        ),
        "engine.payload_folder: with data.source=live and with cluster=slurm states travel through Mooncake. Leave it out",
    ),
    (
        lambda chosen, config: chosen["store"] == "mooncake" and (config.data.num_workers or 0) > 0,
        "data.num_workers>0 with store=mooncake: a forked worker cannot use Mooncake, whose threads are gone in it. "
        "Leave it out",
    ),
    (
        lambda chosen, config: config.data.source == "live" and chosen["engine"] != "vllm",
        "data.source=live needs servers that capture: set engine=vllm",
    ),
    (
        lambda chosen, config: config.data.source == "live" and chosen["store"] != "mooncake",
        "data.source=live without store=mooncake: live samples travel through Mooncake. Set store=mooncake, and "
        "store.keep=disk to keep them on disk too",
    ),
    (
        lambda chosen, config: (
            chosen["store"] == "mooncake" and config.data.source == "stored" and config.store.keep is not None
        ),
        "store.keep has no effect with data.source=stored: use store=disk, or data.source=live",
    ),
    (
        lambda chosen, config: chosen["store"] == "mooncake" and config.store.keep not in KEPT,
        "store.keep: null, or disk",
    ),
)
"""(what is chosen, config) -> whether it contradicts itself, and what to do."""


def settle_source(config: DictConfig, choices: Mapping[str, str]) -> None:
    """Say what data.source=null means: live where an engine captures into Mooncake, else stored."""
    if config.data.source is None:
        config.data.source = "live" if (choices["engine"], choices["store"]) == ("vllm", "mooncake") else "stored"


def refuse_contradictions(config: DictConfig, choices: Mapping[str, str], *, num_ranks: int) -> None:
    """Raises ValueError with every contradiction among the choices; ``num_ranks`` of a group that was started elsewhere."""
    found = [told for contradicts, told in CONTRADICTIONS if contradicts(choices, config)]
    if choices["store"] == "mooncake" and num_ranks > 1 and config.store.generation is None:
        found.append(
            f"store=mooncake in one of {num_ranks} ranks that were not started by this pipeline: give all of them the same "
            "store.generation, else each would remove what the others have put"
        )
    if found:
        raise ValueError("; ".join(found))


def _stages(config: Any) -> Sequence[str]:
    return [config.stages] if isinstance(config.stages, str) else config.stages


def _endpoints(config: Any) -> list[Any]:
    return [given for given in (config.engine.endpoints, config.engine.endpoints_file) if given]


def _addresses(chosen: Mapping[str, str], config: Any) -> list[Any]:
    places = [config.cluster.mooncake, *([config.store] if chosen["store"] == "mooncake" else [])]
    return [value for place in places for value in (place.master_address, place.admin_url) if value]
