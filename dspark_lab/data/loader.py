"""Which rows a rank gets in which order, and loaders that a resumed run takes up at the very row."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from dspark_lab.data.packing import Row, collate, plan_rows, rank_rows
from dspark_lab.records import Batch, TargetSample, content_hash
from dspark_lab.store.protocol import HiddenStateStore

RowSamples = tuple[Row, int, Sequence[TargetSample]]
Lengths = Sequence[tuple[str, int]]


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

    def onward(self, epoch: int, start: int) -> Iterator[tuple[list[Row], int]]:
        """(rows, epoch) of every batch from there on, without end; another thread may draw them."""
        while True:
            for rows in self._plan(epoch)[start:]:
                yield rows, epoch
            epoch, start = epoch + 1, 0

    def _batches(self) -> list[list[Row]]:
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = self.epoch, self._plan(self.epoch)
        return self._planned[1]

    def _plan(self, epoch: int) -> list[list[Row]]:
        rows = plan_rows(self.lengths, row_tokens=self.row_tokens, seed=self.seed, epoch=epoch)
        return rank_rows(rows, rows_per_batch=self.rows_per_batch, rank=self.rank, world_size=self.world_size)


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
        for batch in self._drawn():
            self.num_handed_out += 1
            yield batch

    def _drawn(self) -> Iterator[Any]:
        """The batches of the sampler's epoch from its start."""
        return super().__iter__()

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
