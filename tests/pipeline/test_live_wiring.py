"""data.source=live from the config: what contradicts it, and what it leaves alone."""

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from dspark_lab.configs import config_folder
from dspark_lab.data.live import LiveRecipe
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.live import live_data
from dspark_lab.run import name_run

LIVE = ["data.source=live", "engine=vllm", "store=mooncake", "data.num_workers=0"]


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("config", list(overrides))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("live.num_retries=-1", r"live: num_retries=-1"),
        ("live.max_lost_share=2", r"max_lost_share=2\.0 \(in \[0, 1\]\)"),
        ("live.num_retries=some", r"live\.num_retries"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(override: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build(composed(override), "live")


def test_where_the_states_come_from_is_no_part_of_a_runs_identity() -> None:
    def name(*overrides: str) -> str:
        resolved: Any = OmegaConf.to_container(composed("data=dialogues", *overrides), resolve=True)
        return name_run(resolved, experiment=None, drafter="dspark")[0]

    assert name(*LIVE, "live.window_samples=3") == name("engine=vllm", "data.num_workers=1")


def test_a_window_that_the_segments_have_no_room_for_is_refused() -> None:
    client: Any = None

    def data(window_bytes: int | None):
        recipe = build(composed(f"live.window_bytes={'null' if window_bytes is None else window_bytes}"), "live")
        assert isinstance(recipe, LiveRecipe)
        return live_data(client, [], recipe=recipe, free_bytes=1000, kept=None)

    assert data(None).window.num_bytes == 800
    assert data(1000).window.num_bytes == 1000
    with pytest.raises(ValueError, match=r"live\.window_bytes=1,001: the segments have 1,000 bytes free"):
        data(1001)
