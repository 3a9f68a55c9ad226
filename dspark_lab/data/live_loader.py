"""The loader of live data: its ranks wait, go on and give up together."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from dspark_lab.data.live import LEAST_COUNTED, LiveCounts, LiveData, LiveDataError, LiveInterrupted
from dspark_lab.data.live_batches import LiveBatches
from dspark_lab.data.loader import ResumableLoader, RowSampler
from dspark_lab.data.window import check_window, longest_row
from dspark_lab.progress import console
from dspark_lab.records import Batch
from dspark_lab.training.collectives import all_texts, sum_over_ranks


class LiveLoader(ResumableLoader):
    """Batches from an engine, in the sampler's order; capture goes on over the ends of epochs.

    Args:
        batches_per_step: Of one optimizer step, whose payloads are held together.
        device: Of the collectives; pinned memory where it is a GPU.
        interrupted: Whether this process was told to end: then it does not wait for samples.

    Raises ValueError when the window does not hold one optimizer step.
    """

    def __init__(
        self,
        data: LiveData,
        *,
        rows: RowSampler,
        batches_per_step: int,
        device: torch.device,
        interrupted: Callable[[], bool],
    ) -> None:
        super().__init__(_Rows(), batch_sampler=rows)
        self.counts = LiveCounts()
        self._data, self._device, self._batches_per_step = data, device, batches_per_step
        self._interrupted = interrupted
        row = longest_row(
            [len(data.conversations[key]) for key, _ in rows.lengths],
            row_tokens=rows.row_tokens,
            manifest=data.source.manifest,
        )
        self._window = check_window(
            data.window, row, rows_per_batch=rows.rows_per_batch, accumulate=batches_per_step, num_ranks=rows.world_size
        )
        self._live: LiveBatches | None = None
        self._position = (0, 0)  # epoch and batch that the running capture hands out next

    def release(self) -> None:
        """The optimizer step that used all batches so far is over: their payloads may go."""
        if self._live is not None:
            self._live.release()

    def close(self) -> None:
        """End the capture and remove what it holds in Mooncake."""
        if self._live is not None:
            told = self._live.failure
            self._live.close()
            if self._live.failure != told:
                console.print(f"live data, at its end: {self._live.failure}")
            self._live = None

    def _drawn(self) -> Iterator[Batch]:
        epoch, num_batches = self.rows.epoch, len(self.rows)
        live = self._started(epoch, self.rows.start)
        for index in range(self.rows.start, num_batches):
            if index % self._batches_per_step == 0:
                wanted = min(self._batches_per_step, num_batches - index)
                self._agree(live, starved=not live.step(wanted, interrupted=self._interrupted))
            self._position = (epoch, index + 1) if index + 1 < num_batches else (epoch + 1, 0)
            yield live.take()

    def _started(self, epoch: int, start: int) -> LiveBatches:
        if self._live is None or self._position != (epoch, start):
            self.close()
            self._position = epoch, start
            self._live = LiveBatches(
                self._data,
                plan=self.rows.onward(epoch, start),
                window=self._window,
                row_tokens=self.rows.row_tokens,
                pinned=self._device.type == "cuda",
                counts=self.counts,
            )
        return self._live

    def _agree(self, live: LiveBatches, *, starved: bool) -> None:
        """Go on with this optimizer step only if no rank has to stop before it.

        Raises LiveDataError or LiveInterrupted, on all ranks.
        """
        counts = self.counts
        finished = counts.generated + counts.reused + counts.lost
        own = [live.failure is not None, starved, counts.lost, finished]
        sums = sum_over_ranks(torch.tensor(own, dtype=torch.int64, device=self._device))
        failed, num_starved, lost, finished = sums.tolist()
        share = self._data.recipe.max_lost_share
        if failed:
            raise LiveDataError("; ".join(dict.fromkeys(filter(None, all_texts(live.failure or "")))))
        if num_starved:
            raise LiveInterrupted
        if lost > share * max(finished, LEAST_COUNTED):
            rejected = ", ".join(f"{count} {reason}" for reason, count in counts.rejected.most_common())
            raise LiveDataError(
                f"{lost} of {finished} samples were lost, more than live.max_lost_share={share:g}; rejected by this rank: "
                f"{rejected or 'none'}"
            )


class _Rows(Dataset[Any]):
    """What DataLoader asks for; nothing is read from it."""
