"""Choices of ``engine``, ``store`` and ``cluster`` that contradict each other: one table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

Rule = tuple[Callable[[Mapping[str, str], Any], bool], str]

CONTRADICTIONS: Sequence[Rule] = (
    (
        lambda chosen, config: (
            chosen["engine"] == "vllm"
            and chosen["cluster"] == "none"
            and not _endpoints(config)
            and bool({"regenerate", "capture"} & set(_stages(config)))
        ),
        "engine=vllm needs servers: cluster=local starts them; or name those that run in engine.endpoints or "
        "engine.endpoints_file",
    ),
    (
        lambda chosen, config: chosen["engine"] == "vllm" and len(_endpoints(config)) == 2,
        "engine.endpoints and engine.endpoints_file are both given: which servers are meant? Leave one out",
    ),
    (
        lambda chosen, config: chosen["engine"] == "vllm" and chosen["cluster"] == "local" and bool(_endpoints(config)),
        "cluster=local starts a server of its own, but engine.endpoints or engine.endpoints_file names others: leave them "
        "out, or use cluster=none",
    ),
    (
        lambda chosen, config: (
            chosen["cluster"] == "local" and chosen["engine"] == "huggingface" and chosen["store"] != "mooncake"
        ),
        "cluster=local has nothing to start: neither engine=huggingface nor this store needs a service. Leave it out, or "
        "choose engine=vllm or store=mooncake",
    ),
    (
        lambda chosen, config: chosen["cluster"] == "local" and bool(_addresses(chosen, config)),
        "cluster=local starts Mooncake at addresses that it chooses, but some are given (cluster.mooncake, "
        "store.master_address, store.admin_url): leave them out, or use cluster=none",
    ),
    (
        lambda chosen, config: chosen["store"] == "mooncake" and config.data.num_workers > 0,
        "data.num_workers>0 with store=mooncake: a forked worker cannot use Mooncake, whose threads are gone in it. Set "
        "data.num_workers=0",
    ),
)
"""(what is chosen, config) -> whether it contradicts itself, and what to do."""


def refuse_contradictions(config: DictConfig, choices: Mapping[str, str]) -> None:
    """Raises ValueError with every contradiction among the choices."""
    found = [told for contradicts, told in CONTRADICTIONS if contradicts(choices, config)]
    if found:
        raise ValueError("; ".join(found))


def _stages(config: Any) -> Sequence[str]:
    return [config.stages] if isinstance(config.stages, str) else config.stages


def _endpoints(config: Any) -> list[Any]:
    return [given for given in (config.engine.endpoints, config.engine.endpoints_file) if given]


def _addresses(chosen: Mapping[str, str], config: Any) -> list[Any]:
    places = [config.cluster.mooncake, *([config.store] if chosen["store"] == "mooncake" else [])]
    return [value for place in places for value in (place.master_address, place.admin_url) if value]
