"""The one DataModule of all drafters: captured samples -> packed rows -> ``Batch``, resumable to the row."""

from collections.abc import Sequence
from typing import Annotated, Any

import lightning as L
import torch
from pydantic import SkipValidation
from torch.utils.data import DataLoader

from dspark_lab.data.live import LiveData
from dspark_lab.data.live_loader import LiveLoader
from dspark_lab.data.loader import Collation, Lengths, ResumableLoader, RowSampler, RowSamples, StoredRows
from dspark_lab.data.packing import PackingCounts, SampleOutline, select_samples
from dspark_lab.records import Batch
from dspark_lab.signals import heed_only_parent
from dspark_lab.store.protocol import HiddenStateStore
from dspark_lab.training.checkpoints import signalled
from dspark_lab.validation import checked


class HiddenStateDataModule(L.LightningDataModule):
    """Batches of packed rows from a store, in an order that only (``seed``, epoch) decide.

    ``rows_per_batch`` counts the rows of one rank's step. Every epoch packs anew into the same number of rows;
    validation keeps the packing and order of epoch 0. A Lightning checkpoint records how many rows were handed out on all
    ranks: a resumed run goes on with the next row, whatever ``num_workers`` and the number of ranks. Build the Trainer with
    ``use_distributed_sampler=False``: ranks take their own rows here. What was truncated or skipped is counted in
    ``train_counts`` and ``validation_counts``.

    With ``live`` an engine captures the training samples while training goes on, in the same rows and order; ``close``
    ends that. Validation samples come from the store all the same.

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
        live: Annotated[LiveData | None, SkipValidation] = None,
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
        if live is not None and num_workers:
            raise ValueError(
                f"num_workers={num_workers} with source=live: one thread of the trainer's own process captures; set "
                "num_workers=0"
            )
        self.store = store
        self.live = live
        self._live_loader: LiveLoader | None = None
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
        _check_captured(store, *([] if live else [self.train_lengths]), self.validation_lengths)

    def train_dataloader(self) -> ResumableLoader:
        rows = self._sampler(self.train_lengths, pinned=False)
        if self.live is None:
            return ResumableLoader(**self._loading(rows))
        self.close()
        trainer = self.trainer
        self._live_loader = LiveLoader(
            self.live,
            rows=rows,
            batches_per_step=trainer.accumulate_grad_batches if trainer else 1,
            device=trainer.strategy.root_device if trainer else torch.device("cpu"),
            interrupted=lambda: trainer is not None and signalled(trainer),
        )
        return self._live_loader

    def close(self) -> None:
        """End live capture, where there is one. May be called twice."""
        if self._live_loader is not None:
            self._live_loader.close()

    def val_dataloader(self) -> list[DataLoader[RowSamples]]:
        if not self.validation_lengths:
            return []
        return [DataLoader(**self._loading(self._sampler(self.validation_lengths, pinned=True)))]

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        # Only from pinned memory does a copy run beside the computation.
        return batch.to(device, non_blocking=device.type == "cuda")

    def _sampler(self, lengths: Lengths, *, pinned: bool) -> RowSampler:
        return RowSampler(
            lengths,
            row_tokens=self.row_tokens,
            rows_per_batch=self.rows_per_batch,
            seed=self.seed,
            pinned=pinned,
            rank=self.trainer.global_rank if self.trainer else 0,
            world_size=self.trainer.world_size if self.trainer else 1,
        )

    def _loading(self, sampler: RowSampler) -> dict[str, Any]:
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
