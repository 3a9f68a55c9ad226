"""When training needs a group of processes, and what cannot have one."""

from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir

from dspark_lab.configs import config_folder
from dspark_lab.pipeline import settle
from dspark_lab.pipeline.distributed import must_launch
from dspark_lab.training.place import Place


def parts(*overrides: str, num_ranks: int = 1, store: str = "disk") -> SimpleNamespace:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", list(overrides))
    place = Place(rank=0, local_rank=0, num_ranks=num_ranks, group_folder=None)
    return SimpleNamespace(config=config, place=place, info=SimpleNamespace(choices={"store": store}))


def test_a_group_is_launched_when_there_are_more_ranks_than_processes() -> None:
    assert not must_launch(parts())  # pyright: ignore
    assert must_launch(parts("trainer.devices=2"))  # pyright: ignore
    assert not must_launch(parts("trainer.devices=2", num_ranks=2))  # pyright: ignore
    assert not must_launch(parts("trainer.devices=2", "trainer.num_nodes=2", num_ranks=4))  # pyright: ignore
    assert not must_launch(parts(store="memory"))  # pyright: ignore


@pytest.mark.parametrize(
    ("overrides", "given", "says"),
    [
        (["trainer.devices=2"], {"store": "memory"}, "store=memory is seen by one process only"),
        (["trainer.num_nodes=2"], {}, "cluster=slurm starts ranks on other machines"),
        (["trainer.devices=0"], {}, "trainer.devices=0 must be a number of at least 1, or auto"),
        (["trainer.num_nodes=auto"], {}, "trainer.num_nodes='auto' must be a number of at least 1$"),
        (["trainer.devices=3"], {"num_ranks": 2}, "one of 2 ranks, but .* asks for 3"),
    ],
)
def test_what_cannot_be_a_group_is_refused_with_the_mend(overrides: list[str], given: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        must_launch(parts(*overrides, **given))  # pyright: ignore


@pytest.mark.parametrize(("stages", "overrides"), [(["evaluate"], []), (["train"], ["run.fresh=true"])])
def test_a_group_does_nothing_but_train(
    monkeypatch: pytest.MonkeyPatch, stages: list[str], overrides: list[str]
) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="rank 1 of 2; a group only does stages=train"):
        settle(stages, parts(*overrides).config)
