"""Choices that contradict each other are refused with the mend; the table is tested row by row."""

import re

import pytest
from hydra import compose, initialize_config_dir

from dspark_lab.configs import config_folder
from dspark_lab.pipeline.combinations import CONTRADICTIONS, refuse_contradictions, settle_source

SERVER = "engine.endpoints=[http://127.0.0.1:8000]"
NO_WORKERS = "data.num_workers=0"


def check(*overrides: str, num_ranks: int = 1) -> str:
    """What data.source is then."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", list(overrides), return_hydra_config=True)
    choices = {str(group): str(choice) for group, choice in config.hydra.runtime.choices.items()}
    settle_source(config, choices)
    refuse_contradictions(config, choices, num_ranks=num_ranks)
    return config.data.source


LIVE = ["data.source=live", "engine=vllm", "cluster=local", "store=mooncake", NO_WORKERS]
ALLOWED = [
    LIVE,
    [*LIVE, "store.keep=disk"],
    [],
    ["store=memory"],
    ["store=mooncake"],
    ["store=mooncake", NO_WORKERS],
    ["store=mooncake", "cluster=local", NO_WORKERS],
    ["engine=vllm", SERVER],
    ["engine=vllm", "engine.endpoints_file=/etc/servers", "store=memory"],
    ["engine=vllm", "cluster=local"],
    ["engine=vllm", "cluster=local", "engine.payload_folder=/dev/shm/states"],
    ["engine=vllm", "cluster=slurm"],
    ["cluster=slurm"],
    ["engine=vllm", "cluster=local", "store=mooncake", NO_WORKERS],
    ["engine=vllm", "stages=train"],  # what was captured is in the store
]
REFUSED = [
    (["engine=vllm"], "engine=vllm needs servers: cluster=local and cluster=slurm start them"),
    (["engine=vllm", "stages=capture"], "engine=vllm needs servers"),
    (["engine=vllm", SERVER, "engine.endpoints_file=/etc/servers"], "both given"),
    (["engine=vllm", "cluster=local", SERVER], "start servers of their own"),
    (["engine=vllm", "cluster=slurm", SERVER], "start servers of their own"),
    (["cluster=local"], "cluster=local has nothing to start"),
    (["cluster=local", "engine=vllm", "cluster.mooncake.master_address=a:1"], "at addresses that they choose"),
    (["cluster=local", "store=mooncake", NO_WORKERS, "store.admin_url=http://a:1"], "at addresses that they choose"),
    (["data.source=live", "store=mooncake", NO_WORKERS], r"data\.source=live needs servers"),
    (["data.source=live", "engine=vllm", SERVER], r"data\.source=live without store=mooncake"),
    (["data.source=live", "engine=vllm", "store=mooncake", NO_WORKERS, "stages=train"], "engine=vllm needs servers"),
    (["store=mooncake", "store.keep=disk", NO_WORKERS], r"store\.keep has no effect"),
    ([*LIVE, "store.keep=memory"], r"store\.keep: null, or disk"),
    ([*LIVE, "engine.payload_folder=/dev/shm/states"], r"engine\.payload_folder: .* travel through Mooncake"),
    (["engine=vllm", "cluster=slurm", "engine.payload_folder=/states"], r"engine\.payload_folder: .* through Mooncake"),
    (["store=mooncake", "data.num_workers=1"], r"data\.num_workers>0 with store=mooncake"),
]


@pytest.mark.parametrize("overrides", ALLOWED, ids=" ".join)
def test_what_goes_together(overrides: list[str]) -> None:
    check(*overrides)


@pytest.mark.parametrize(("overrides", "says"), REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED])
def test_what_does_not(overrides: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check(*overrides)


def test_an_engine_that_captures_into_mooncake_does_so_live() -> None:
    through_mooncake = ("engine=vllm", "store=mooncake", "cluster=local")
    assert check(*through_mooncake) == "live" and check(*through_mooncake, "data.source=stored") == "stored"
    assert check("+experiment=live_cpu") == "live"
    assert check("engine=vllm", "cluster=local") == check("store=mooncake") == check() == "stored"


def test_every_row_of_the_table_is_tested() -> None:
    for _, told in CONTRADICTIONS:
        assert any(re.search(says, told) for _, says in REFUSED), told


def test_ranks_that_another_launcher_started_share_a_generation() -> None:
    check("store=mooncake", "store.generation=g", NO_WORKERS, num_ranks=2)
    with pytest.raises(ValueError, match=r"give all of them the same store\.generation"):
        check("store=mooncake", NO_WORKERS, num_ranks=2)
