"""The thread that makes live batches. Failures and outcomes: docs/capture_and_stores.md."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch

from dspark_lab.capture.protocol import CaptureError, Described, EngineUnreachableError, Reason, payload_bytes
from dspark_lab.data.live import LiveCounts, LiveData, LiveDataError
from dspark_lab.data.packing import Row, collate
from dspark_lab.data.window import Window
from dspark_lab.records import Batch, TargetSample, TokenizedConversation
from dspark_lab.store.mooncake_admin import MasterUnreachableError
from dspark_lab.store.mooncake_errors import MooncakeError
from dspark_lab.store.protocol import (
    CorruptSampleError,
    Manifest,
    MissingSampleError,
    NonFiniteSampleError,
)

SHORTEST_POLL_S, LONGEST_POLL_S = 0.001, 0.02
RETRY_S = 1.0  # between two requests for the same sample
INTERRUPT_POLL_S = 0.5  # between two looks for a signal
LATE_PAYLOADS_S = 5.0  # for payloads of the last requests
SWEEP_S = 30.0  # between two looks for payloads that came too late


@dataclass(slots=True, eq=False)
class _Ticket:
    """A sample's place in the window: free again when training has used it and its payload is removed."""

    conversation: TokenizedConversation
    size: Window
    num_failures: int = 0
    not_before: float = 0.0
    answer: Future[Described] | None = None
    described: Described | None = None
    deadline: float = 0.0
    sample: TargetSample | None = None


@dataclass(frozen=True, slots=True)
class _Planned:
    rows: Sequence[Row]
    epoch: int
    tickets: Sequence[_Ticket]  # of the rows' keys in order


class LiveBatches:
    """The batches of ``plan``, (rows, epoch) each, in its order, made by a thread that owns the source and its window.

    The training loop calls ``step`` before each optimizer step and ``take`` for each batch of it. What was taken is in use
    until the next ``step`` or ``release``; only then its payloads are removed and its place in the window is free.

    A sample that fails too often has its tokens in its row, without states and without supervision.
    """

    def __init__(
        self,
        data: LiveData,
        *,
        plan: Iterator[tuple[Sequence[Row], int]],
        window: Window,
        row_tokens: int,
        pinned: bool,
        counts: LiveCounts,
    ) -> None:
        self.counts = counts
        self.failure: str | None = None
        self._data, self._source, self._recipe = data, data.source, data.recipe
        self._row_tokens, self._pinned = row_tokens, pinned
        self._window, self._held = window, Window(0, 0)
        self._open: deque[_Planned] = deque()  # planned batches that are not ready
        self._coming = self._tickets(plan)
        self._next = next(self._coming, None)
        self._under_way: list[_Ticket] = []
        self._lost_in_a_row = 0
        self._gone_since: float | None = None
        self._swept_at, self._to_sweep = time.monotonic(), False
        self._changed = threading.Condition()  # guards what both threads touch: these three, failure and closing
        self._ready: deque[tuple[Batch, Sequence[_Ticket]]] = deque()
        self._handed: list[_Ticket] = []
        self._used: list[_Ticket] = []
        self._closing = False
        self._pool = ThreadPoolExecutor(self._source.concurrency, "live-request")
        self._thread = threading.Thread(target=self._run, name="live-capture", daemon=True)
        self._thread.start()

    def step(self, num_batches: int, *, interrupted: Callable[[], bool]) -> bool:
        """Wait until as many batches are ready, ``failure`` is set or ``interrupted``; whether they are ready.

        What was taken before counts as used.
        """
        self.release()
        with self._changed:
            while len(self._ready) < num_batches and not self.failure and not interrupted():
                self._changed.wait(INTERRUPT_POLL_S)
            return len(self._ready) >= num_batches

    def take(self) -> Batch:
        with self._changed:
            batch, tickets = self._ready.popleft()
            self._handed += tickets
        return batch

    def release(self) -> None:
        """The optimizer step that used all that was taken is over."""
        with self._changed:
            self._used += self._handed
            self.counts.used += len(self._handed)
            self._handed.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and remove every payload that it holds. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # All below runs in the thread.

    def _run(self) -> None:
        try:
            with self._data.kept() if self._data.kept else nullcontext() as self._kept:
                self._kept_keys = set(self._kept.keys()) if self._kept is not None else set()
                self._work()
        except Exception as error:
            with self._changed:
                self.failure = str(error) if isinstance(error, LiveDataError) else f"{type(error).__name__}: {error}"
                self._changed.notify_all()
        finally:
            self._tidy()

    def _work(self) -> None:
        pause = SHORTEST_POLL_S
        while not self._closing:
            moved = self._forget_used()
            moved |= self._admit()
            moved |= self._advance()
            moved |= self._deliver()
            self._sweep()
            self.counts.waiting = len(self._under_way)
            pause = SHORTEST_POLL_S if moved else min(2 * pause, LONGEST_POLL_S)
            if not moved:
                with self._changed:
                    self._changed.wait(pause)

    def _tickets(self, plan: Iterator[tuple[Sequence[Row], int]]) -> Iterator[_Ticket]:
        manifest, conversations = self._source.manifest, self._data.conversations
        for rows, epoch in plan:
            wanted = [conversations[key] for row in rows for key in row.keys]
            tickets = [_Ticket(one, Window(1, payload_bytes(len(one), manifest))) for one in wanted]
            self._open.append(_Planned(rows, epoch, tickets))
            yield from tickets

    def _forget_used(self) -> bool:
        with self._changed:
            used, self._used = self._used, []
        if used:
            self._source.remove([ticket.described for ticket in used if ticket.described is not None])
            for ticket in used:
                self._held = self._held - ticket.size
        return bool(used)

    def _admit(self) -> bool:
        """Take in tickets in the plan's order while the window has room."""
        admitted = False
        while self._next is not None and self._window.holds(self._held + self._next.size):
            if self._kept is not None and any(
                self._next.conversation is other.conversation for other in self._under_way
            ):
                break  # of the epoch before: it will be kept
            ticket, self._next = self._next, next(self._coming, None)
            self._held = self._held + ticket.size
            admitted = True
            ticket.sample = self._find_kept(ticket.conversation.key)
            if ticket.sample is None:
                self._under_way.append(ticket)
        return admitted

    def _find_kept(self, key: str) -> TargetSample | None:
        if self._kept is None or key not in self._kept_keys:
            return None
        with suppress(CorruptSampleError, MissingSampleError):
            sample = self._kept.get(key)
            self.counts.reused += 1
            return sample
        self._kept_keys.discard(key)
        return None

    def _advance(self) -> bool:
        asked = sum(ticket.answer is not None and ticket.described is None for ticket in self._under_way)
        # While the engine is gone, one request finds out when it is back.
        self._may_ask = (1 if self._gone_since is not None else self._source.concurrency) - asked
        moved = False
        for ticket in self._under_way:
            moved |= self._advance_one(ticket)
        if moved:
            self._under_way = [ticket for ticket in self._under_way if ticket.sample is None]
        return moved

    def _advance_one(self, ticket: _Ticket) -> bool:
        """Whether anything happened. Raises LiveDataError, MasterUnreachableError."""
        try:
            if ticket.described is not None:
                return self._receive(ticket, ticket.described)
            if ticket.answer is not None:
                return self._hear(ticket, ticket.answer)
            return self._ask(ticket)
        except EngineUnreachableError as error:
            self._outlast(ticket, error)
        except CaptureError as error:
            self._reject(ticket, error.reason, error)
        except NonFiniteSampleError as error:
            self._reject(ticket, "non_finite", error)
        except (MooncakeError, MissingSampleError, CorruptSampleError) as error:
            self._reject(ticket, "transfer", error)
        return True

    def _ask(self, ticket: _Ticket) -> bool:
        if self._may_ask <= 0 or time.monotonic() < ticket.not_before:
            return False
        self._may_ask -= 1
        ticket.answer = self._pool.submit(self._source.submit, ticket.conversation)
        ticket.answer.add_done_callback(self._wake)
        return True

    def _wake(self, answer: Future[Described]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _hear(self, ticket: _Ticket, answer: Future[Described]) -> bool:
        if not answer.done():
            return False
        ticket.described = answer.result()
        ticket.deadline = time.monotonic() + self._source.payload_timeout_s
        self._gone_since = None
        return True

    def _receive(self, ticket: _Ticket, described: Described) -> bool:
        if not self._source.ready(described):
            if time.monotonic() > ticket.deadline:
                text = f"{described['handle']}: no payload after {self._source.payload_timeout_s:g} s"
                raise CaptureError(text, reason="no_payload")
            return False
        ticket.sample = self._source.get(ticket.conversation, described)
        self.counts.generated += 1
        self._lost_in_a_row = 0
        if self._kept is not None:
            self._kept.put(ticket.conversation.key, ticket.sample)
            self._kept_keys.add(ticket.conversation.key)
        return True

    def _outlast(self, ticket: _Ticket, error: EngineUnreachableError) -> None:
        now = time.monotonic()
        self._gone_since = self._gone_since or now
        if now - self._gone_since > self._recipe.engine_deadline_s:
            raise LiveDataError(f"no engine for live.engine_deadline_s={self._recipe.engine_deadline_s:g} s: {error}")
        ticket.answer, ticket.not_before = None, now + RETRY_S

    def _reject(self, ticket: _Ticket, reason: Reason, error: Exception) -> None:
        self.counts.rejected[reason] += 1
        ticket.num_failures += 1
        if ticket.described is not None:
            self._source.remove([ticket.described])
        ticket.answer = ticket.described = None
        ticket.not_before = time.monotonic() + RETRY_S
        self._to_sweep = True
        if ticket.num_failures <= self._recipe.num_retries:
            self.counts.regenerated += 1
            return
        ticket.sample = blank(ticket.conversation, self._source.manifest)
        self.counts.lost += 1
        self._lost_in_a_row += 1
        if self._lost_in_a_row > self._recipe.max_lost_in_a_row:
            raise LiveDataError(
                f"{self._lost_in_a_row} samples in a row were lost, more than live.max_lost_in_a_row="
                f"{self._recipe.max_lost_in_a_row}; the last one: {error}"
            )

    def _deliver(self) -> bool:
        if not self._open or any(ticket.sample is None for ticket in self._open[0].tickets):
            return False
        planned = self._open.popleft()
        samples = iter([ticket.sample for ticket in planned.tickets if ticket.sample is not None])
        rows = [(row, [next(samples) for _ in row.keys]) for row in planned.rows]
        batch = collate(rows, row_tokens=self._row_tokens, epoch=planned.epoch)
        for ticket in planned.tickets:
            ticket.sample = None  # what it views is free for another payload
        with self._changed:
            self._ready.append((batch.pin_memory() if self._pinned else batch, planned.tickets))
            self._changed.notify_all()
        return True

    def _sweep(self) -> None:
        if self._to_sweep and time.monotonic() - self._swept_at > SWEEP_S:
            self._source.remove_strays()
            self._swept_at, self._to_sweep = time.monotonic(), False

    def _tidy(self) -> None:
        """Remove all that is held. What cannot be removed now, the run's next generation removes."""
        self._pool.shutdown(cancel_futures=True)
        held = self._held_payloads()
        with suppress(MasterUnreachableError, MooncakeError):
            deadline, late = time.monotonic() + LATE_PAYLOADS_S, held
            while late and time.monotonic() < deadline:  # a reply may come before its payload
                late = [described for described in late if not self._arrived(described)]
                time.sleep(LONGEST_POLL_S if late else 0)
            self._source.remove(held)
            self._source.remove_strays()

    def _held_payloads(self) -> list[Described]:
        tickets = [*self._under_way, *self._handed, *self._used]
        tickets += [ticket for planned in self._open for ticket in planned.tickets]
        tickets += [ticket for _, batch in self._ready for ticket in batch]
        held = {id(ticket): ticket.described for ticket in tickets if ticket.described is not None}
        for ticket in tickets:
            if ticket.described is None and ticket.answer is not None:
                with suppress(Exception):  # of the request, or that it was cancelled
                    held[id(ticket)] = ticket.answer.result()
        return list(held.values())

    def _arrived(self, described: Described) -> bool:
        with suppress(CaptureError):
            return self._source.ready(described)
        return True  # or will not


def blank(conversation: TokenizedConversation, manifest: Manifest) -> TargetSample:
    """In the place of a lost sample: its tokens, no states, nothing supervised."""
    shape = (len(conversation), len(manifest.layer_ids), manifest.hidden_size)
    return TargetSample(
        token_ids=conversation.token_ids,
        loss_mask=torch.zeros_like(conversation.loss_mask),
        hidden_states=torch.zeros(shape, dtype=manifest.torch_dtype),
        last_hidden_state=torch.zeros(shape[0], shape[2], dtype=manifest.torch_dtype),
    )
