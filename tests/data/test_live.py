"""Live data: the stored run's batches whatever the timing, a window that is kept, and what becomes of failures."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from test_datamodule import (
    Recorder,
    assert_ranks_share_and_go_on,
    conversations,
    every_step,
    fill,
    identity,
    outlines,
    trainer,
)
from toy_engine import MANIFEST, ToyEngine, live

import dspark_lab.data.live_batches as live_module
from dspark_lab.data.datamodule import HiddenStateDataModule
from dspark_lab.data.live import LiveDataError
from dspark_lab.data.loader import ResumableLoader
from dspark_lab.data.packing import SampleOutline
from dspark_lab.data.window import Window, longest_row
from dspark_lab.records import Batch, TokenizedConversation
from dspark_lab.store.disk import DiskStore
from dspark_lab.store.memory import MemoryStore
from dspark_lab.training.live import LiveWatch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),  # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*number of training batches.*is smaller than the logging interval.*"),
]
ROW_TOKENS = 64


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "RETRY_S", 0.01)


@pytest.fixture(scope="module")
def samples() -> list[TokenizedConversation]:
    return conversations(40)


@pytest.fixture(scope="module")
def store(samples: list[TokenizedConversation]) -> MemoryStore:
    return fill(MemoryStore(manifest=MANIFEST), samples)


class Modules:
    """Makes data modules, and ends their capture with the test."""

    def __init__(self, store: MemoryStore, samples: Sequence[TokenizedConversation]) -> None:
        self.store, self.samples = store, samples
        self.made: list[HiddenStateDataModule] = []

    def __call__(self, engine: ToyEngine | None = None, **settings: Any) -> HiddenStateDataModule:
        own = {"rows_per_batch", "seed", "num_workers"}
        data = {"rows_per_batch": 2, "seed": 5, "num_workers": 0} | {k: v for k, v in settings.items() if k in own}
        recipe = {name: value for name, value in settings.items() if name not in own}
        source = live(engine, self.samples, **recipe) if engine else None
        train = [SampleOutline.of(sample) for sample in self.samples]
        made = HiddenStateDataModule(store=self.store, train=train, row_tokens=ROW_TOKENS, live=source, **data)
        self.made.append(made)
        return made


@pytest.fixture
def module(store: MemoryStore, samples: list[TokenizedConversation]) -> Iterator[Modules]:
    modules = Modules(store, samples)
    yield modules
    for made in modules.made:
        made.close()


def assert_same(found: Batch, wanted: Batch) -> None:
    for field in fields(Batch):
        ours, theirs = getattr(found, field.name), getattr(wanted, field.name)
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, field.name


def needed(samples: Sequence[TokenizedConversation]) -> Window:
    return longest_row([len(sample) for sample in samples], row_tokens=ROW_TOKENS, manifest=MANIFEST)


@pytest.mark.parametrize("seed", [0, 1])
def test_batches_are_those_of_the_store_whatever_the_timing(module: Modules, seed: int) -> None:
    stored, loader = module().train_dataloader(), module(ToyEngine(seed=seed)).train_dataloader()
    for _ in range(3):  # epochs
        for found, wanted in zip(loader, stored, strict=True):
            assert_same(found, wanted)


def test_an_iteration_that_is_given_up_is_followed_by_the_next_epoch(module: Modules) -> None:
    stored, loader = module().train_dataloader(), module(ToyEngine()).train_dataloader()
    for one in (stored, loader):
        next(iter(one))
    assert [identity(batch) for batch in loader] == [identity(batch) for batch in stored]


def test_the_window_is_kept_and_payloads_stay_until_their_step_is_over(
    module: Modules, samples: list[TokenizedConversation], tmp_path: Path
) -> None:
    engine, row = ToyEngine(), needed(samples)
    window = row * 4  # two batches of two rows: one step, accumulated
    data = module(engine, window=window)
    lying: list[tuple[set[str], set[str]]] = []

    class Watch(Recorder):
        def training_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
            used = {key for _, _, keys in self.seen[-1:] for key in keys} if batch_index % 2 else set()
            lying.append(({*batch.keys, *used}, {held.key for held, _ in list(engine.payloads.values())}))
            return super().training_step(batch, batch_index)

    trainer(tmp_path, max_epochs=3, accumulate_grad_batches=2, enable_checkpointing=False).fit(Watch(), data)
    assert len(lying) > 10
    for needed_now, there in lying:
        assert needed_now <= there  # the whole window of accumulation
    assert window.holds(engine.most)
    data.close()
    assert engine.payloads == {}


@pytest.mark.parametrize("what", ["samples", "bytes"])
def test_a_window_smaller_than_one_step_is_refused_with_the_numbers(
    module: Modules, samples: list[TokenizedConversation], what: str
) -> None:
    need = needed(samples) * 2
    small = Window(need.num_samples - (what == "samples"), need.num_bytes - (what == "bytes"))
    says = rf"rows_per_batch=2 x trainer\.accumulate=1 rows.*together {need.num_samples:,} samples and {need.num_bytes:,} b"
    with pytest.raises(ValueError, match=says):
        module(ToyEngine(), window=small).train_dataloader()
    assert len(list(module(ToyEngine(), window=need).train_dataloader())) == 5


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("refused", "engine"),
        ("failed", "producer"),
        ("other ids", "token_ids"),
        ("nan", "non_finite"),
        ("nothing", "no_payload"),
    ],
)
def test_a_failing_sample_is_asked_for_again(
    module: Modules, samples: list[TokenizedConversation], fault: str, reason: str
) -> None:
    engine = ToyEngine(payload_timeout_s=0.1)
    engine.faults[samples[3].key] = [fault, fault]
    # A window of one step: the sample of the next epoch is not asked for meanwhile.
    loader = module(engine, num_retries=2, window=needed(samples) * 2).train_dataloader()
    for found, wanted in zip(loader, module().train_dataloader(), strict=True):
        assert_same(found, wanted)
    assert loader.counts.rejected == {reason: 2} and loader.counts.regenerated == 2  # pyright: ignore
    assert loader.counts.lost == 0  # pyright: ignore


def test_a_lost_sample_leaves_its_place_unsupervised_and_is_counted(
    module: Modules, samples: list[TokenizedConversation]
) -> None:
    engine, lost = ToyEngine(), samples[3].key
    engine.always[lost] = "nan"
    loader = module(engine, num_retries=1).train_dataloader()
    for found, wanted in zip(loader, module().train_dataloader(), strict=True):
        assert identity(found) == identity(wanted) and torch.equal(found.document_ids, wanted.document_ids)
        place = torch.zeros_like(found.loss_mask)
        if lost in found.keys:
            place = found.document_ids == found.keys.index(lost)
            assert place.any() and not found.loss_mask[place].any() and not found.hidden_states[place].any()
        for name in ("loss_mask", "hidden_states", "last_hidden_state"):
            assert torch.equal(getattr(found, name)[~place], getattr(wanted, name)[~place])
    assert loader.counts.lost == 1 and loader.counts.rejected == {"non_finite": 2}  # pyright: ignore


def test_an_engine_that_is_gone_for_a_while_is_waited_for(module: Modules) -> None:
    engine = ToyEngine()
    loader = module(engine).train_dataloader()
    found = []
    for batch in loader:
        if len(found) == 2:
            engine.gone = True
            live_module.threading.Timer(0.3, lambda: setattr(engine, "gone", False)).start()
        found.append(identity(batch))
    assert found == [identity(batch) for batch in module().train_dataloader()]
    assert loader.counts.lost == 0 and not loader.counts.rejected  # pyright: ignore


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"engine_deadline_s": 0.05}, r"no engine for live\.engine_deadline_s=0\.05 s: connection refused"),
        ({"max_lost_in_a_row": 3}, r"4 samples in a row were lost, more than live\.max_lost_in_a_row=3; .*NaN"),
        ({"max_lost_share": 0.05}, r"\d+ of \d+ samples were lost, more than live\.max_lost_share=0\.05.*non_finite"),
    ],
)
@pytest.mark.parametrize("at_step", [3, 5, 6])  # 5: an epoch's last
def test_too_many_failures_end_the_training_with_a_checkpoint_that_goes_on(
    module: Modules,
    samples: list[TokenizedConversation],
    tmp_path: Path,
    recipe: dict[str, Any],
    says: str,
    at_step: int,
) -> None:
    uninterrupted = Recorder()
    trainer(tmp_path, enable_checkpointing=False).fit(uninterrupted, module())

    engine, first, second = ToyEngine(), Recorder(), Recorder()
    window = needed(samples) * 2
    path = tmp_path / "stopped.ckpt"
    data = module(engine, num_retries=0, window=window, **recipe)

    class Break(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
            if trainer.global_step == at_step:
                engine.gone = "engine_deadline_s" in recipe
                engine.always = {} if engine.gone else dict.fromkeys((s.key for s in samples), "nan")

    with pytest.raises(LiveDataError, match=says):
        trainer(tmp_path, callbacks=[Break(), LiveWatch(path)]).fit(first, data)
    watch = LiveWatch(path)
    trainer(tmp_path, callbacks=[watch]).fit(second, module(ToyEngine()), ckpt_path=path, weights_only=True)
    assert first.seen + second.seen == uninterrupted.seen
    assert len(first.seen) >= at_step
    assert watch.totals["used"] > 40 and watch.totals["generated"] >= watch.totals["used"] - watch.totals["lost"]


@pytest.mark.parametrize("limit", ["epochs", "steps"])
def test_a_run_killed_at_any_step_goes_on_with_exactly_the_next_row(
    module: Modules, tmp_path: Path, limit: str
) -> None:
    steps = len(module().train_dataloader())
    bound = {"max_epochs": 3} if limit == "epochs" else {"max_steps": 3 * steps, "max_epochs": -1}
    uninterrupted = Recorder()
    trainer(tmp_path, **bound, enable_checkpointing=False).fit(uninterrupted, module())
    for killed_after in (1, steps - 1, steps, steps + 1, 2 * steps + 2):
        folder = tmp_path / str(killed_after)
        first, second = Recorder(die_after=killed_after), Recorder()
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            trainer(folder, **bound, callbacks=[every_step(folder)]).fit(first, module(ToyEngine()))
        trainer(folder, **bound, callbacks=[every_step(folder)]).fit(
            second, module(ToyEngine()), ckpt_path=folder / f"step={killed_after}.ckpt", weights_only=True
        )
        assert first.seen + second.seen == uninterrupted.seen, f"killed after {killed_after} of {steps} steps"


def test_another_number_of_ranks_takes_the_rest_of_the_rows_in_the_same_order(module: Modules) -> None:
    def loader(world_size: int, rank: int = 0, *, stored: bool = False) -> ResumableLoader:
        data = module(None if stored else ToyEngine(seed=rank), rows_per_batch=4 // world_size)
        data.trainer = SimpleNamespace(  # pyright: ignore
            global_rank=rank,
            world_size=world_size,
            accumulate_grad_batches=1,
            callbacks=[],
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
        )
        return data.train_dataloader()

    assert_ranks_share_and_go_on(loader, whole=[loader(1, stored=True)])


def test_what_passes_by_is_kept_and_asked_for_once(
    module: Modules, samples: list[TokenizedConversation], tmp_path: Path
) -> None:
    def kept() -> DiskStore:
        return DiskStore(tmp_path / "states", manifest=MANIFEST, reserve_bytes=0)

    stored, first = list(module().train_dataloader()), ToyEngine()
    data = module(first, kept=kept)
    loader = data.train_dataloader()
    for _ in range(2):
        list(loader)
    data.close()
    assert len(set(first.asked)) == len(samples) == len(first.asked)
    assert sorted(kept().keys()) == sorted(sample.key for sample in samples)
    another = ToyEngine()
    loader = module(another, kept=kept).train_dataloader()
    for found, wanted in zip(loader, stored, strict=True):
        assert_same(found, wanted)
    assert another.asked == [] and loader.counts.reused >= len(samples)  # pyright: ignore


def test_a_store_that_cannot_keep_more_ends_the_training_with_the_reason(module: Modules) -> None:
    engine = ToyEngine()
    data = module(engine, kept=lambda: MemoryStore(manifest=MANIFEST, limit_bytes=4000))
    with pytest.raises(LiveDataError, match="NoRoomError"):
        list(data.train_dataloader())
    data.close()
    assert engine.payloads == {}


def test_counts_are_logged_shown_and_carried_over_a_resume(
    module: Modules, samples: list[TokenizedConversation], tmp_path: Path
) -> None:
    engine = ToyEngine()
    engine.faults[samples[3].key] = ["nan"]
    watch, first = LiveWatch(tmp_path / "last.ckpt"), Recorder()
    fitted = trainer(tmp_path, max_epochs=1, callbacks=[watch, every_step(tmp_path)], log_every_n_steps=1)
    fitted.fit(first, module(engine))
    logged = {name: int(value) for name, value in fitted.callback_metrics.items() if name.startswith("live/")}
    assert logged["live/used"] == len(samples) <= logged["live/generated"]
    assert logged["live/regenerated"] == logged["live/rejected_non_finite"] == 1 and logged["live/lost"] == 0
    assert watch.note.startswith("generated ") and f"used {len(samples)}  waiting " in watch.note
    again = LiveWatch(tmp_path / "last.ckpt")
    trainer(tmp_path, max_epochs=2, callbacks=[again, every_step(tmp_path)]).fit(
        Recorder(), module(ToyEngine()), ckpt_path=tmp_path / "step=5.ckpt", weights_only=True
    )
    assert again.totals["used"] == 2 * len(samples) and again.totals["rejected_non_finite"] == 1


def test_workers_are_refused(module: Modules) -> None:
    with pytest.raises(ValueError, match="num_workers=1 with source=live"):
        module(ToyEngine(), num_workers=1)


def test_validation_comes_from_the_store(store: MemoryStore, samples: list[TokenizedConversation]) -> None:
    train, held_out = samples[:30], samples[30:]
    engine = ToyEngine()
    data = HiddenStateDataModule(
        store=store, train=outlines(train), validation=outlines(held_out), row_tokens=64, num_workers=0,
        live=live(engine, train),
    )  # fmt: skip
    (loader,) = data.val_dataloader()
    assert {key for batch in loader for key in batch.keys} == {sample.key for sample in held_out}
    assert engine.asked == []
