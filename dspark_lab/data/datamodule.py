"""The one DataModule of all drafters: captured samples -> packed rows -> ``Batch``, resumable to the row."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any

import lightning as L
import torch
from pydantic import SkipValidation
from torch.utils.data import DataLoader, Dataset, Sampler

from dspark_lab.data.packing import PackingCounts, Row, SampleOutline, collate, plan_rows, rank_rows, select_samples
from dspark_lab.records import Batch, TargetSample, content_hash
from dspark_lab.signals import heed_only_parent
from dspark_lab.store.protocol import HiddenStateStore
from dspark_lab.validation import checked

RowSamples = tuple[Row, int, Sequence[TargetSample]]
Lengths = Sequence[tuple[str, int]]


class HiddenStateDataModule(L.LightningDataModule):
    """Batches of packed rows from a store, in an order that only (``seed``, epoch) decide.

    ``rows_per_batch`` counts the rows of one rank's step. Every epoch packs anew into the same number of rows;
    validation keeps the packing and order of epoch 0. A Lightning checkpoint records how many rows were handed out on all
    ranks: a resumed run goes on with the next row, whatever ``num_workers`` and the number of ranks. Build the Trainer with
    ``use_distributed_sampler=False``: ranks take their own rows here. What was truncated or skipped is counted in
    ``train_counts`` and ``validation_counts``.

    Raises ValueError when no training sample has a supervised token, or the store lacks a sample.
    """

    @checked
    def __init__(
        self,
        *,
        store: Annotated[HiddenStateStore, SkipValidation],
        train: Annotated[Sequence[SampleOutline], SkipValidation],
        validation: Annotated[Sequence[SampleOutline], SkipValidation] = (),
        row_tokens: int = 1024,
        rows_per_batch: int = 1,
        num_workers: int = 1,
        prefetch_factor: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("row_tokens", row_tokens, 2),
            ("rows_per_batch", rows_per_batch, 1),
            ("num_workers", num_workers, 0),
            ("prefetch_factor", prefetch_factor, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        self.store = store
        self.row_tokens = row_tokens
        self.rows_per_batch = rows_per_batch
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.seed = seed
        self.train_lengths, self.train_counts = select_samples(train, row_tokens=row_tokens)
        self.validation_lengths, self.validation_counts = select_samples(validation, row_tokens=row_tokens)
        _check_supervised("training", len(train), self.train_counts)
        if len(validation):
            _check_supervised("validation", len(validation), self.validation_counts)
        _check_captured(store, self.train_lengths, self.validation_lengths)

    def train_dataloader(self) -> "ResumableLoader":
        return ResumableLoader(**self._loading(self._sampler(self.train_lengths, pinned=False)))

    def val_dataloader(self) -> "list[DataLoader[RowSamples]]":
        if not self.validation_lengths:
            return []
        return [DataLoader(**self._loading(self._sampler(self.validation_lengths, pinned=True)))]

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        # Only from pinned memory does a copy run beside the computation.
        return batch.to(device, non_blocking=device.type == "cuda")

    def _sampler(self, lengths: Lengths, *, pinned: bool) -> "RowSampler":
        return RowSampler(
            lengths,
            row_tokens=self.row_tokens,
            rows_per_batch=self.rows_per_batch,
            seed=self.seed,
            pinned=pinned,
            rank=self.trainer.global_rank if self.trainer else 0,
            world_size=self.trainer.world_size if self.trainer else 1,
        )

    def _loading(self, sampler: "RowSampler") -> dict[str, Any]:
        return {
            "dataset": StoredRows(self.store),
            "batch_sampler": sampler,
            "collate_fn": Collation(self.row_tokens),
            "num_workers": self.num_workers,
            "prefetch_factor": self.prefetch_factor if self.num_workers else None,
            "persistent_workers": self.num_workers > 0,
            "pin_memory": self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            "worker_init_fn": heed_only_parent,
            # Else every new iterator draws a seed from torch's global generator, and a resumed run draws once more.
            "generator": torch.Generator().manual_seed(self.seed),
        }


class RowSampler(Sampler[list[tuple[Row, int]]]):
    """The batches of one rank in one epoch, as (row, epoch) pairs: the dataset's "indices"."""

    def __init__(
        self,
        lengths: Lengths,
        *,
        row_tokens: int,
        rows_per_batch: int,
        seed: int,
        pinned: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.lengths = lengths
        self.row_tokens = row_tokens
        self.rows_per_batch = rows_per_batch
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.pinned = pinned
        self.epoch = 0
        self.start = 0  # batches of the epoch that iterations leave out
        self._planned: tuple[int, list[list[Row]]] | None = None

    @property
    def sampler(self) -> "RowSampler":
        """Lightning calls ``set_epoch`` on ``loader.batch_sampler.sampler``, never on the batch sampler itself."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Where to begin; without effect once ``pinned``."""
        if not self.pinned:
            self.epoch = epoch

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What decides which rows there are and in which order they come, whatever the number of ranks."""
        return {"samples": content_hash(sorted(self.lengths)), "row_tokens": self.row_tokens, "seed": self.seed}

    @property
    def rows_per_step(self) -> int:
        """Of one batch of each rank."""
        return self.rows_per_batch * self.world_size

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[tuple[Row, int]]]:
        epoch = self.epoch
        for batch in self._batches()[self.start :]:
            yield [(row, epoch) for row in batch]

    def _batches(self) -> list[list[Row]]:
        if self._planned is None or self._planned[0] != self.epoch:
            rows = plan_rows(self.lengths, row_tokens=self.row_tokens, seed=self.seed, epoch=self.epoch)
            batches = rank_rows(rows, rows_per_batch=self.rows_per_batch, rank=self.rank, world_size=self.world_size)
            self._planned = self.epoch, batches
        return self._planned[1]


class StoredRows(Dataset[RowSamples]):
    """Reads the samples of a row; the store opens its files anew in each worker."""

    def __init__(self, store: HiddenStateStore) -> None:
        self.store = store

    def __getitem__(self, index: tuple[Row, int]) -> RowSamples:
        row, epoch = index
        return row, epoch, [self.store.get(key) for key in row.keys]


class Collation:
    """``collate`` as DataLoader wants it; a class, so that spawned workers can receive it."""

    def __init__(self, row_tokens: int) -> None:
        self.row_tokens = row_tokens

    def __call__(self, rows: Sequence[RowSamples]) -> Batch:
        pairs = [(row, samples) for row, _, samples in rows]
        return collate(pairs, row_tokens=self.row_tokens, epoch=rows[0][1])


class ResumableLoader(DataLoader[RowSamples]):
    """A DataLoader that Lightning saves and restores with its loops.

    It counts the batches handed out, not those that workers prefetched, and the epochs it has begun: each iteration is
    the next epoch, the first one after ``load_state_dict`` the rest of the recorded one. Lightning's count only says
    where to begin without a recorded place: resuming by steps from the end of an epoch, 2.6 counts an epoch too many.

    ``__iter__`` is a generator because Lightning asks for iterators that it never draws from, and for the first one
    before it restores the epoch: only the first draw begins an epoch.
    """

    begun = False  # whether the sampler's epoch has been drawn from
    num_handed_out = 0  # batches of that epoch

    @property
    def rows(self) -> RowSampler:
        assert isinstance(self.batch_sampler, RowSampler)
        return self.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        if self.begun:
            self.rows.epoch, self.rows.start = self.rows.epoch + 1, 0
        self.begun = self.rows.pinned = True
        self.num_handed_out = self.rows.start
        for batch in super().__iter__():
            self.num_handed_out += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.rows.epoch,
            "num_rows": self.num_handed_out
            * self.rows.rows_per_step,  # on all ranks; the epoch's last step is filled up
            "rows_per_step": self.rows.rows_per_step,
            "plan": self.rows.identity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the checkpoint's rows are not these rows, or its place is within a step of this run."""
        differences = [
            f"{name}: checkpoint {state['plan'].get(name)!r}, this run {value!r}"
            for name, value in self.rows.identity.items()
            if state["plan"].get(name) != value
        ]
        if differences:
            raise ValueError(
                "the checkpoint was trained on other rows, so its place in the epoch means nothing here "
                f"({'; '.join(differences)}); give it the same settings and data, or start a fresh run"
            )
        if state["rows_per_step"] != self.rows.rows_per_step:
            raise ValueError(
                f"the checkpoint was trained on {state['rows_per_step']} rows a batch of all ranks, this run takes "
                f"data.rows_per_batch={self.rows.rows_per_batch} x {self.rows.world_size} ranks = "
                f"{self.rows.rows_per_step}: set data.rows_per_batch so that the product is the same"
            )
        epoch, num_batches = state["epoch"], state["num_rows"] // self.rows.rows_per_step
        if num_batches == len(self.rows):
            epoch, num_batches = epoch + 1, 0
        self.rows.epoch, self.rows.start = epoch, num_batches
        self.rows.pinned, self.begun, self.num_handed_out = True, False, num_batches


def _check_supervised(split: str, num_given: int, counts: PackingCounts) -> None:
    if counts.num_samples == 0:
        raise ValueError(
            f"no {split} sample has a supervised token: of {num_given} samples, "
            f"{counts.skipped_without_supervised_tokens} have none at all and {counts.skipped_by_truncation} only "
            "beyond row_tokens; check that conversations hold assistant turns or answers, or raise row_tokens"
        )


def _check_captured(store: HiddenStateStore, *splits: Lengths) -> None:
    captured = store.lengths()
    wanted = [key for lengths in splits for key, _ in lengths]
    missing = [key for key in wanted if key not in captured]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(wanted)} samples are not in the store (first: {missing[0]}); run the capture "
            "stage for these conversations again"
        )
