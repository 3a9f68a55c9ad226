"""data.source=live from the config: what contradicts it, and what it leaves alone."""

from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from dspark_lab.__main__ import config_folder
from dspark_lab.data.live import LiveRecipe
from dspark_lab.pipeline import live
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.live import check_live, live_data
from dspark_lab.run import name_run

LIVE = ["data=dialogues", "data.source=live", "store=mooncake", "data.num_workers=0", "live.url=http://127.0.0.1:8000"]


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("config", list(overrides))


def check(*overrides: str, store: str = "mooncake", num_ranks: int = 1) -> None:
    config = composed(*overrides)
    check_live(config, {"store": store}, build(config, "data"), build(config, "live"), num_ranks=num_ranks)


def test_what_goes_together() -> None:
    check(*LIVE)
    check(*LIVE, "store.keep=disk")
    check(*LIVE, "store.generation=g", num_ranks=2)
    check(store="disk")


@pytest.mark.parametrize(
    ("overrides", "given", "says"),
    [
        (
            [*LIVE, "store=disk"],
            {"store": "disk"},
            r"data\.source=live with store=disk.*Set store=mooncake, and store\.keep",
        ),
        ([*LIVE, "data.num_workers=1"], {}, r"data\.num_workers=1 with store=mooncake.*Set data\.num_workers=0"),
        ([*LIVE, "live.url=null"], {}, r"needs an engine that captures: live\.url="),
        (
            [*LIVE, "data.source=stored", "store.keep=disk"],
            {},
            r"store\.keep=disk has no effect with data\.source=stored",
        ),
        ([*LIVE, "store.keep=memory"], {}, r"store\.keep=memory: null, or disk"),
        (LIVE, {"num_ranks": 2}, r"give all of them the same store\.generation"),
    ],
)
def test_what_contradicts_is_refused_with_the_mend(overrides: list[str], given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check(*overrides, **given)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("live.concurrency=0", r"live: concurrency=0"),
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

    assert name(*LIVE[1:], "live.window_samples=3") == name("data.num_workers=1")


def test_a_window_that_the_segments_have_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "room", lambda url: SimpleNamespace(free_bytes=1000))
    client: Any = SimpleNamespace(admin_url="u")

    def data(window_bytes: int | None):
        recipe = build(composed(f"live.window_bytes={'null' if window_bytes is None else window_bytes}"), "live")
        assert isinstance(recipe, LiveRecipe)
        return live_data(client, [], recipe=recipe, kept=None)

    assert data(None).window.num_bytes == 800
    assert data(1000).window.num_bytes == 1000
    with pytest.raises(ValueError, match=r"live\.window_bytes=1,001: the segments have 1,000 bytes free"):
        data(1001)
