"""Rows of epochs, ranks and workers, and a real Lightning run that is interrupted and resumed."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from pydantic import ValidationError
from toy_engine import MANIFEST

from dspark_lab.data.datamodule import HiddenStateDataModule
from dspark_lab.data.loader import ResumableLoader
from dspark_lab.data.packing import SampleOutline
from dspark_lab.records import Batch, TargetSample, TokenizedConversation
from dspark_lab.store.disk import DiskStore
from dspark_lab.store.memory import MemoryStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),  # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty"),
    # The loaders are small on purpose.
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*number of training batches.*is smaller than the logging interval.*"),
]


def conversations(num: int, *, seed: int = 0) -> list[TokenizedConversation]:
    generator = random.Random(seed)
    result = []
    for index in range(num):
        token_ids = torch.tensor([generator.randrange(100) for _ in range(generator.randrange(8, 24))])
        loss_mask = torch.zeros(token_ids.numel(), dtype=torch.bool)
        loss_mask[token_ids.numel() // 2 :] = True
        result.append(TokenizedConversation(f"c{index}", token_ids, loss_mask))
    return result


def fill(store, samples: list[TokenizedConversation]):
    for sample in samples:
        states = sample.token_ids[:, None].float().expand(-1, 4)
        store.put(
            sample.key,
            TargetSample(sample.token_ids, sample.loss_mask, states[:, None].repeat(1, 2, 1), states.clone()),
        )
    store.sync()
    return store


def outlines(samples: list[TokenizedConversation]) -> list[SampleOutline]:
    return [SampleOutline.of(sample) for sample in samples]


@pytest.fixture(scope="module")
def samples() -> list[TokenizedConversation]:
    return conversations(40)


@pytest.fixture(scope="module")
def store(samples):
    return fill(MemoryStore(manifest=MANIFEST), samples)


def module(store, train, validation=(), **settings) -> HiddenStateDataModule:
    settings = {"row_tokens": 64, "rows_per_batch": 2, "num_workers": 0, "seed": 5} | settings
    return HiddenStateDataModule(store=store, train=outlines(train), validation=outlines(validation), **settings)


def identity(batch: Batch) -> tuple:
    return batch.epoch, batch.row_ids, batch.keys


class Recorder(L.LightningModule):
    """Trains one weight; remembers which rows came, and stops as if killed after ``die_after`` steps."""

    def __init__(self, die_after: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(1, 1)
        self.die_after = die_after
        self.seen: list[tuple] = []
        self.validated: list[tuple] = []

    def training_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
        if self.die_after == len(self.seen):
            raise KeyboardInterrupt
        self.seen.append(identity(batch))
        return self.weight(batch.last_hidden_state.mean().view(1)).sum()

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        self.validated.append(identity(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(folder, **settings) -> L.Trainer:
    settings = {"max_epochs": 3, "limit_val_batches": 0} | settings
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **settings,
    )


def every_step(folder) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


def test_an_epoch_holds_every_sample_once_and_epochs_are_packed_differently(store, samples, tmp_path):
    recorder = Recorder()
    trainer(tmp_path, max_epochs=2, enable_checkpointing=False).fit(recorder, module(store, samples))
    epochs = [[seen for seen in recorder.seen if seen[0] == epoch] for epoch in (0, 1)]
    assert [seen[0] for seen in recorder.seen] == [0] * len(epochs[0]) + [1] * len(epochs[0])
    for epoch in epochs:
        assert sorted(key for _, _, keys in epoch for key in keys) == sorted(sample.key for sample in samples)
        rows = [row for _, row_ids, _ in epoch for row in row_ids]
        assert rows == list(range(len(rows)))
    assert [keys for _, _, keys in epochs[0]] != [keys for _, _, keys in epochs[1]]


def test_batches_hold_what_was_captured(store, samples):
    by_key = {sample.key: sample for sample in samples}
    for batch in module(store, samples).train_dataloader():
        documents = [
            (batch.token_ids[batch.document_ids == document], batch.loss_mask[batch.document_ids == document])
            for document in range(int(batch.document_ids.max()) + 1)
        ]
        for key, (token_ids, loss_mask) in zip(batch.keys, documents, strict=True):
            assert torch.equal(token_ids, by_key[key].token_ids) and torch.equal(loss_mask, by_key[key].loss_mask)
        assert torch.equal(batch.last_hidden_state[..., 0], batch.token_ids.float())


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_order_does_not_depend_on_the_workers(store, samples, num_workers):
    def order(workers: int) -> list[tuple]:
        loader = module(store, samples, num_workers=workers).train_dataloader()
        next(iter(loader))  # an iteration that is given up
        return [identity(batch) for _ in range(2) for batch in loader]

    assert order(num_workers) == order(0)
    assert {epoch for epoch, _, _ in order(num_workers)} == {1, 2}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("limit", ["epochs", "steps"])
def test_a_run_killed_at_any_step_goes_on_with_exactly_the_next_row(store, samples, tmp_path, num_workers, limit):
    data = {"store": store, "train": samples, "num_workers": num_workers}
    steps = len(module(**data).train_dataloader())
    bound = {"max_epochs": 3} if limit == "epochs" else {"max_steps": 3 * steps, "max_epochs": -1}
    uninterrupted = Recorder()
    trainer(tmp_path, **bound, enable_checkpointing=False).fit(uninterrupted, module(**data))
    assert len(uninterrupted.seen) == 3 * steps and steps > 3
    # In the first epoch, at its end, at the next one's first step, and in the middle of a later one.
    every_case = (1, steps - 1, steps, steps + 1, 2 * steps + 2)
    for killed_after in every_case if num_workers == 0 else (steps - 1, steps + 1):
        folder = tmp_path / str(killed_after)
        first, second = Recorder(die_after=killed_after), Recorder()
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            trainer(folder, **bound, callbacks=[every_step(folder)]).fit(first, module(**data))
        trainer(folder, **bound, callbacks=[every_step(folder)]).fit(
            second, module(**data), ckpt_path=folder / f"step={killed_after}.ckpt", weights_only=True
        )
        assert first.seen + second.seen == uninterrupted.seen, f"killed after {killed_after} of {steps} steps"


@pytest.mark.parametrize("limit", ["epochs", "steps"])
@pytest.mark.parametrize("when", ["validation", "epoch"])
def test_checkpoints_of_validation_and_of_the_epochs_end_resume_too(store, samples, tmp_path, when, limit):
    train, held_out = samples[:30], samples[30:]
    steps = len(module(store, train).train_dataloader())
    settings = {"max_epochs": 3} if limit == "epochs" else {"max_steps": 3 * steps, "max_epochs": -1}
    settings |= {"limit_val_batches": None}
    if when == "validation":
        settings |= {"val_check_interval": 3, "check_val_every_n_epoch": None}

    def run(ckpt_path=None) -> list[tuple]:
        at_end = when == "epoch"
        keep_all = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1, save_on_train_epoch_end=at_end)
        recorder, data = Recorder(), module(store, train, held_out)
        trainer(tmp_path, **settings, callbacks=[keep_all]).fit(recorder, data, ckpt_path=ckpt_path, weights_only=True)
        return recorder.seen

    uninterrupted = run()
    checkpoints = list(tmp_path.glob("step=*.ckpt"))
    assert len(checkpoints) >= 3
    for path in checkpoints:
        done = int(path.stem.split("=")[1])
        assert run(path) == uninterrupted[done:], path.name


def test_a_finished_run_can_be_extended(store, samples, tmp_path):
    steps = len(module(store, samples).train_dataloader())
    whole = Recorder()
    trainer(tmp_path, max_epochs=-1, max_steps=2 * steps + 1, enable_checkpointing=False).fit(
        whole, module(store, samples)
    )
    first, second = Recorder(), Recorder()
    short = trainer(tmp_path, max_epochs=-1, max_steps=steps, callbacks=[every_step(tmp_path)])
    short.fit(first, module(store, samples))
    longer = trainer(tmp_path, max_epochs=-1, max_steps=2 * steps + 1, callbacks=[every_step(tmp_path)])
    longer.fit(second, module(store, samples), ckpt_path=tmp_path / f"step={steps}.ckpt", weights_only=True)
    assert first.seen + second.seen == whole.seen


def test_validation_repeats_its_rows_in_a_fixed_order(store, samples, tmp_path):
    recorder = Recorder()
    settings = {"max_epochs": 2, "limit_val_batches": None, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    data = module(store, samples[:30], samples[30:], num_workers=1)
    trainer(tmp_path, **settings).fit(recorder, data)
    steps = len(data.val_dataloader()[0])
    assert recorder.validated[:steps] == recorder.validated[steps:]
    assert {epoch for epoch, _, _ in recorder.validated} == {0}
    assert sorted(key for _, _, keys in recorder.validated[:steps] for key in keys) == sorted(
        sample.key for sample in samples[30:]
    )


def test_a_resumed_run_with_other_rows_is_refused(store, samples, tmp_path):
    trainer(tmp_path, max_epochs=1, callbacks=[every_step(tmp_path)]).fit(Recorder(), module(store, samples))
    for settings, complaint in (
        ({"seed": 6}, "seed: checkpoint 5, this run 6"),
        ({"row_tokens": 32}, "row_tokens: checkpoint 64, this run 32"),
        ({"train": samples[1:]}, "samples: checkpoint"),
    ):
        other = module(**{"store": store, "train": samples} | settings)
        with pytest.raises(ValueError, match=f"trained on other rows.*{complaint}"):
            trainer(tmp_path, callbacks=[every_step(tmp_path)]).fit(
                Recorder(), other, ckpt_path=tmp_path / "step=2.ckpt", weights_only=True
            )


def rows_of_steps(loaders: Sequence[ResumableLoader]) -> list[list[int]]:
    """Without the copies that give every rank a row in the last step: they are not supervised."""
    steps = zip(*(list(loader) for loader in loaders), strict=True)
    return [
        sorted(row for batch in step for row, mask in zip(batch.row_ids, batch.loss_mask, strict=True) if mask.any())
        for step in steps
    ]


def assert_ranks_share_and_go_on(loader: Callable[..., ResumableLoader], *, whole: Sequence[ResumableLoader]) -> None:
    """``loader(world_size, rank)``: two ranks take the steps of ``whole``, four the rest of what one has begun."""
    expected = rows_of_steps(whole)
    assert rows_of_steps([loader(2, rank) for rank in range(2)]) == expected
    begun = loader(1)
    batches = iter(begun)
    for _ in range(2):
        next(batches)
    others = [loader(4, rank) for rank in range(4)]
    for other in others:
        other.load_state_dict(begun.state_dict())
    assert rows_of_steps(others) == expected[2:]


def test_another_number_of_ranks_takes_the_rest_of_the_rows_in_the_same_order(store, samples):
    def loader(world_size: int, rank: int = 0) -> ResumableLoader:
        data = module(store, samples, rows_per_batch=4 // world_size)
        data.trainer = SimpleNamespace(  # pyright: ignore
            global_rank=rank, world_size=world_size, strategy=SimpleNamespace(root_device=torch.device("cpu"))
        )
        return data.train_dataloader()

    assert_ranks_share_and_go_on(loader, whole=[loader(1)])


def test_other_rows_per_batch_are_refused_with_the_mend(store, samples):
    state = module(store, samples, rows_per_batch=2).train_dataloader().state_dict()
    with pytest.raises(ValueError, match=r"2 rows a batch of all ranks.*data\.rows_per_batch=3 x 1 ranks = 3"):
        module(store, samples, rows_per_batch=3).train_dataloader().load_state_dict(state)


def test_loading_does_not_draw_from_the_global_generator(store, samples):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for _ in module(store, samples, num_workers=1).train_dataloader():
        pass
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read_a_disk_store(samples, tmp_path, start):
    with fill(DiskStore(tmp_path / "states", manifest=MANIFEST, reserve_bytes=0), samples) as disk:
        expected = [identity(batch) for batch in module(disk, samples).train_dataloader()]
        loader = module(disk, samples, num_workers=1).train_dataloader()
        loader.multiprocessing_context = start
        assert [identity(batch) for batch in loader] == expected


def test_fewer_tokens_than_a_row_make_one_padded_row(store, samples):
    (batch,) = module(store, samples[:1], rows_per_batch=4, row_tokens=64).train_dataloader()
    assert batch.row_ids == (0,) and batch.token_ids.shape == (1, 64)
    assert batch.num_tokens == len(samples[0]) < 64


def test_counts_tell_what_was_not_trained_on(store, samples):
    silent = TokenizedConversation("s", torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.bool))
    counts = module(store, [*samples, silent, samples[0]]).train_counts
    assert (counts.skipped_without_supervised_tokens, counts.duplicates, counts.num_samples) == (1, 1, len(samples))


def test_without_any_supervised_token_there_is_nothing_to_train(store, samples):
    silent = TokenizedConversation("s", torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.bool))
    late = TokenizedConversation("l", torch.arange(70), torch.arange(70) >= 65)
    with pytest.raises(ValueError, match=r"no training sample .* of 2 samples, 1 have none at all and 1 only beyond"):
        module(store, [silent, late])
    with pytest.raises(ValueError, match="no validation sample has a supervised token: of 1 samples"):
        module(store, samples, [silent])
    with pytest.raises(ValueError, match="no training sample has a supervised token: of 0 samples"):
        module(store, [])


def test_samples_that_were_not_captured_are_named(store, samples):
    foreign = conversations(1, seed=99)
    with pytest.raises(ValueError, match=rf"1 of 41 samples are not in the store \(first: {foreign[0].key}\)"):
        module(store, samples, foreign)


@pytest.mark.parametrize(
    ("name", "value"), [("row_tokens", 1), ("rows_per_batch", 0), ("num_workers", -1), ("prefetch_factor", 0)]
)
def test_settings_out_of_range_are_refused(store, samples, name, value):
    with pytest.raises(ValueError, match=f"{name}={value}: must be at least"):
        module(store, samples, **{name: value})


def test_settings_of_a_wrong_type_are_refused(store, samples):
    with pytest.raises(ValidationError, match="row_tokens"):
        module(store, samples, row_tokens="many")
