"""+rehearse=cpu: the same config in either order of the overlays, and a true list of what it replaces."""

from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_dir

from dspark_lab.__main__ import in_order
from dspark_lab.configs import config_folder
from dspark_lab.pipeline.rehearsal import replaced, table_of

EXPERIMENT, REHEARSE = "+experiment=kimi_k3_dspark", "+rehearse=cpu"


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        yield


def test_the_order_in_which_overlays_are_typed_does_not_count() -> None:
    typed = [REHEARSE, "seed=3", EXPERIMENT, "-m"]
    assert in_order(typed) == ["seed=3", "-m", EXPERIMENT, REHEARSE]
    assert in_order(["--cfg", "job", "+sweep=markov", EXPERIMENT]) == ["--cfg", "job", EXPERIMENT, "+sweep=markov"]


def test_in_the_wrong_order_hydra_would_lose_the_rehearsal() -> None:
    """Why they are put in order at all."""
    assert compose("config", [EXPERIMENT, REHEARSE]).target.name == "tiny"
    assert compose("config", [REHEARSE, EXPERIMENT]).target.name == "kimi_k3"


def test_what_a_rehearsal_replaces_is_named_once_and_nothing_else_differs() -> None:
    found = {each.key: (each.experiment, each.rehearsal) for each in replaced("config", [EXPERIMENT, REHEARSE])}
    assert found["target"] == ("kimi_k3", "tiny")
    assert not [key for key in found if key.startswith(("target.", "data.", "cluster."))]
    assert found["drafter.attention"][1] is None and found["drafter.attention"][0]["num_heads"] == 96
    assert found["trainer.devices"] == (4, 2)
    for kept in (
        "engine",
        "store",
        "loss",
        "optimizer",
        "drafter.block_size",
        "drafter.markov",
        "stages",
        "data.source",
    ):
        assert kept not in found
    experiment, rehearsal = compose("config", [EXPERIMENT]), compose("config", [EXPERIMENT, REHEARSE])
    assert experiment.loss == rehearsal.loss and experiment.stages == rehearsal.stages
    assert rehearsal.data.source == "live" and rehearsal.optimizer._target_ == experiment.optimizer._target_


def test_an_override_of_the_command_line_is_in_both_and_so_not_told() -> None:
    keys = [each.key for each in replaced("config", [EXPERIMENT, REHEARSE, "trainer.max_steps=7"])]
    assert "trainer.max_steps" not in keys and "trainer.devices" in keys
    assert table_of(replaced("config", [EXPERIMENT, REHEARSE])).row_count > len(keys)


@pytest.mark.parametrize(
    ("experiment", "rehearsal"), [("kimi_k3_dspark_mla", "cpu"), ("kimi_k3_dspark", "cpu_dspark_mla")]
)
def test_a_rehearsal_of_another_attention_is_refused(experiment: str, rehearsal: str) -> None:
    with pytest.raises(
        ValueError, match=f"rehearse={rehearsal} is of a drafter with(out)? latent attention, the .*cpu_dspark_mla"
    ):
        replaced("config", [f"+experiment={experiment}", f"+rehearse={rehearsal}"])


def test_latent_attention_is_rehearsed_without_the_gate() -> None:
    found = {each.key: each.rehearsal for each in replaced("config", [f"{EXPERIMENT}_mla", f"{REHEARSE}_dspark_mla"])}
    assert found["drafter.attention.kv_lora_rank"] == 32 and "serve" not in found["stages"]


@pytest.mark.parametrize("drafter", ["dflash", "eagle3"])
def test_the_other_drafters_have_sizes_of_their_own(drafter: str) -> None:
    config = compose("config", [f"+experiment=kimi_k3_{drafter}", f"+rehearse=cpu_{drafter}"])
    assert config.target.name == "tiny" and config.drafter.attention is None
