"""Two gloo ranks train what one process trains with the doubled batch, and send no more than they must."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import in_process, train, train_as_rank
from tiny_world import SPEC, build

from dspark_lab.report.metrics_log import curve, read_metrics
from dspark_lab.training.checkpoints import checkpoint_step
from dspark_lab.training.trainer import choose_strategy

pytestmark = [pytest.mark.slow]
STEPS = 12
STRATEGIES = ("ddp", "fsdp")


@dataclass(frozen=True)
class Trained:
    """What a training left: ``checkpoint`` of the last step, loss by step, and each rank's notes."""

    checkpoint: Mapping[str, Any]
    losses: Mapping[float, float]
    notes: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, run_dir: Path) -> "Trained":
        found = curve(read_metrics(run_dir), "train/loss")
        assert found is not None
        return cls(
            checkpoint=torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True),
            losses=dict(zip(found.step, found.value, strict=True)),
            notes=tuple(torch.load(file) for file in sorted(run_dir.glob("notes_*.pt"))),
        )

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.checkpoint["state_dict"]


def alone(run_dir: Path, **settings: Any) -> Trained:
    process = in_process(train, run_dir, **{"rows_per_batch": 2, "max_steps": STEPS} | settings)
    process.join(120)
    assert process.exitcode == 0
    return Trained.of(run_dir)


def as_group(run_dir: Path, *, strategy: str, num_ranks: int = 2, watch: bool = True, **settings: Any) -> Trained:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_dir.mkdir(exist_ok=True)
    group = {
        "num_ranks": num_ranks,
        "port": port,
        "strategy": strategy,
        "watch": watch,
        "rows_per_batch": 2 // num_ranks,
    }
    ranks = [
        in_process(train_as_rank, run_dir, rank=rank, **group | {"max_steps": STEPS} | settings)
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.join(120)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0] * num_ranks  # None: it hangs
    return Trained.of(run_dir)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def one(folder: Path) -> Trained:
    return alone(folder / "one")


@pytest.fixture(scope="module", params=STRATEGIES)
def two(request: pytest.FixtureRequest, folder: Path) -> Trained:
    return as_group(folder / request.param, strategy=request.param)


def assert_close(actual: Trained, expected: Trained, *, steps: int = STEPS) -> None:
    """To fp32 rounding: losses of every step, and final weights."""
    assert set(actual.losses) == set(expected.losses) == set(range(steps))
    for step, loss in expected.losses.items():
        assert actual.losses[step] == pytest.approx(loss, rel=2e-5), step
    assert list(actual.weights) == list(expected.weights)
    for name, value in expected.weights.items():
        torch.testing.assert_close(actual.weights[name], value, rtol=0, atol=2e-4, msg=lambda text: f"{name}: {text}")  # noqa: B023


def test_two_ranks_are_one_process_with_the_doubled_batch(one: Trained, two: Trained) -> None:
    assert_close(two, one)


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_so_they_are_for_the_other_drafters(folder: Path, name: str, strategy: str) -> None:
    expected = alone(folder / f"{name}-one-{strategy}", name=name, max_steps=6)
    assert_close(as_group(folder / f"{name}-{strategy}", strategy=strategy, name=name, max_steps=6), expected, steps=6)


def test_accumulating_is_the_doubled_batch_too(folder: Path, one: Trained) -> None:
    # 14 rows an epoch: no window is cut short by the end of an epoch.
    assert_close(alone(folder / "accumulated", rows_per_batch=1, accumulate=2), one)


def test_ranks_share_the_rows_of_a_step_and_repeat_one_where_none_is_left(two: Trained) -> None:
    first, second = (notes["rows"] for notes in two.notes)
    assert len(first) == len(second) == STEPS
    assert all(set(ours).isdisjoint(theirs) for ours, theirs in zip(first, second, strict=True))


def test_checkpoint_keys_are_those_of_one_process_and_load_anywhere(one: Trained, two: Trained) -> None:
    assert list(two.weights) == list(one.weights)
    assert {name: tuple(value.shape) for name, value in two.weights.items()} == {
        name: tuple(value.shape) for name, value in one.weights.items()
    }
    assert all(type(value) is torch.Tensor for value in two.weights.values())
    build("dspark").load_state_dict(dict(two.weights))


def test_propose_works_after_a_step_and_is_the_same_on_every_rank(two: Trained) -> None:
    first, second = (notes["proposed"] for notes in two.notes)
    assert len(first) == 3 and first == second


def test_a_step_sends_the_drafters_own_parameters_once_and_nothing_of_the_targets(two: Trained) -> None:
    parameters = sum(value.numel() for value in two.weights.values())
    markov = two.weights["markov_head.markov_w1.weight"].numel() + two.weights["markov_head.markov_w2.weight"].numel()
    frozen = SPEC.vocab_size * SPEC.hidden_size
    assert parameters > frozen > markov, "else the frozen matrix could hide in the rest"
    small = 64  # the normaliser's sums; DDP tells the order of its buckets once
    padding = 2 * sum(value[0].numel() for value in two.weights.values())  # odd numbers of rows on two ranks
    for step in two.notes[0]["steps"][2:]:
        large = [(name, size) for name, size in step if size > small]
        names = [name for name, _ in large]
        if names == ["allreduce_"]:
            assert large[0][1] == parameters
        else:
            # Validation has gathered them already, and nothing has changed them since.
            assert names in (["_allgather_base_", "_reduce_scatter_base_"], ["_reduce_scatter_base_"])
            # A call's tensors are the whole and this rank's half.
            assert all(1.5 * parameters <= size < 1.5 * parameters + padding for _, size in large)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_number_of_ranks_goes_on_with_the_same_rows(folder: Path, one: Trained, strategy: str) -> None:
    grown = folder / f"grown-{strategy}"
    alone(grown, max_steps=5)
    assert checkpoint_step(grown / "checkpoints" / "last.ckpt") == 5
    assert_close(as_group(grown, strategy=strategy, watch=False), one)
    shrunk = folder / f"shrunk-{strategy}"
    as_group(shrunk, strategy=strategy, watch=False, max_steps=5)
    assert_close(alone(shrunk), one)


def test_a_strategy_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy='fsdp' needs several ranks"):
        choose_strategy("fsdp", num_ranks=1)
    assert choose_strategy("auto", num_ranks=1) == "auto"
