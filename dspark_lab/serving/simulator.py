"""One engine, step by step: admit, choose draft lengths, fill up with prefill, let the step's time pass, emit.

A step of the simulation is a step of the engine: its time comes from a ``HardwareProfile``, its draft lengths from a
``VerifyScheduler``, what becomes of the drafts from an ``AcceptanceTable``. Nothing else takes time.
"""

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dspark_lab.hardware.protocol import HardwareProfile, Ints, StepShape
from dspark_lab.hardware.served import Capacity
from dspark_lab.scheduler.protocol import Load, VerifyScheduler
from dspark_lab.serving.acceptance import AcceptanceTable
from dspark_lab.serving.log import Log, Recorder
from dspark_lab.serving.workload import Request, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``batch_tokens``: most tokens of a step, verified and prefilled. ``prefill`` *free*: done by other machines."""

    num_requests: int
    batch_tokens: int
    prefill: Literal["shared", "free"] = "shared"


def simulate(
    *,
    profile: HardwareProfile,
    acceptance: AcceptanceTable | None,
    scheduler: VerifyScheduler | None,
    workload: Workload,
    load: float,
    limits: Limits,
    room: Capacity | None,
    duration_s: float,
    seed: int,
) -> Log:
    """``duration_s`` simulated seconds; equal arguments give equal logs.

    Args:
        acceptance: None: no drafter, plain decoding.
        scheduler: None: everything that is drafted is verified. It serves this one simulation.
        load: clients (closed loop) or requests per second.
        room: for context; None: without a limit.

    Raises:
        ValueError: a step that takes no positive time, a request that fits into no empty engine, or a step that cannot
            hold the drafts of all requests.
    """
    width = 0 if acceptance is None else acceptance.width
    if limits.num_requests * (1 + width) > limits.batch_tokens:
        raise ValueError(
            f"batch_tokens={limits.batch_tokens} cannot hold {limits.num_requests} requests of {1 + width} tokens each: "
            "raise it, or lower num_requests"
        )
    engine = _Engine(profile, acceptance, scheduler, workload, limits, room, np.random.default_rng(seed))
    return engine.run(load, duration_s)


class _Engine:
    """State of the running requests: arrays over slots, of which ``rows`` are in use, in order of admission."""

    def __init__(
        self,
        profile: HardwareProfile,
        acceptance: AcceptanceTable | None,
        scheduler: VerifyScheduler | None,
        workload: Workload,
        limits: Limits,
        room: Capacity | None,
        generator: np.random.Generator,
    ) -> None:
        self.profile, self.acceptance, self.scheduler = profile, acceptance, scheduler
        self.workload, self.limits, self.room, self.generator = workload, limits, room, generator
        self.width = 0 if acceptance is None else acceptance.width
        self.slots_up_to_width = np.arange(self.width)
        self.now = 0.0
        self.arrivals: list[tuple[float, int, Request]] = []  # a heap; the number keeps equal times in order
        self.num_asked = self.num_admitted = 0
        self.waiting: deque[Request] = deque()
        self.rows = np.zeros(0, np.int64)
        self.free_slots = list(range(limits.num_requests))
        self.free_bytes = 0.0 if room is None else room.free_bytes
        number = limits.num_requests
        self.requests: list[Request | None] = [None] * number
        self.prefill_left, self.remaining, self.context = (np.zeros(number, np.int64) for _ in range(3))
        self.trace_start, self.trace_length, self.cursor = (np.zeros(number, np.int64) for _ in range(3))
        self.request_ids = np.zeros(number, np.int64)
        self.first_s = np.zeros(number)
        self.draft_s: dict[int, float] = {}
        self.recorder = Recorder()

    def run(self, load: float, duration_s: float) -> Log:
        for request in self.workload.first_requests(load, until_s=duration_s, generator=self.generator):
            self._ask(request)
        while self.now < duration_s:
            self._admit()
            if not len(self.rows):
                if not self.arrivals:
                    break
                self.now = self.arrivals[0][0]
                continue
            self._step()
        return self.recorder.log(duration_s=duration_s, width=self.width)

    def _ask(self, request: Request) -> None:
        heapq.heappush(self.arrivals, (request.asked_s + self.workload.frontend_s, self.num_asked, request))
        self.num_asked += 1

    def _admit(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.now:
            self.waiting.append(heapq.heappop(self.arrivals)[2])
        admitted = []
        while self.waiting and self.free_slots:
            needed = self._bytes_of(self.waiting[0])
            if needed > self.free_bytes:
                if not len(self.rows) and not admitted:
                    raise ValueError(
                        f"a request of {self.waiting[0].prompt_tokens} + {self.waiting[0].output_tokens} tokens needs "
                        f"{needed / 1e9:.2f} GB a GPU for its context, {self.free_bytes / 1e9:.2f} GB are free: use more "
                        "GPUs or shorter requests"
                    )
                break
            self.free_bytes -= needed
            admitted.append(self._start(self.waiting.popleft()))
        if admitted:
            self.rows = np.concatenate([self.rows, np.array(admitted)])
            self._finish()  # of those prefilled elsewhere, the ones with a single token

    def _bytes_of(self, request: Request) -> float:
        """Reserved at admission for its whole length: nothing is ever preempted."""
        return 0.0 if self.room is None else self.room.needed_bytes(request.prompt_tokens + request.output_tokens)

    def _start(self, request: Request) -> int:
        slot = self.free_slots.pop()
        self.requests[slot] = request
        self.request_ids[slot] = self.num_admitted
        self.num_admitted += 1
        self.remaining[slot], self.cursor[slot] = request.output_tokens, 0
        self.prefill_left[slot], self.context[slot] = request.prompt_tokens, 0
        if self.acceptance is not None:
            played = int(self.generator.integers(len(self.acceptance.starts)))
            self.trace_start[slot] = self.acceptance.starts[played]
            self.trace_length[slot] = self.acceptance.lengths[played]
        if self.limits.prefill == "free":  # its first token comes with it
            self.prefill_left[slot], self.context[slot] = 0, request.prompt_tokens
            self.remaining[slot] -= 1
            self.first_s[slot] = self.now
            self.recorder.handed_over(1)
        return slot

    def _step(self) -> None:
        left = self.prefill_left[self.rows]
        decoding = self.rows[left == 0]
        context = int(self.context[decoding].sum())
        lengths, accepted = self._drafts(decoding, int(left.sum()), context)
        num_verify = len(decoding) + int(lengths.sum())
        pending = self.rows[left > 0]
        chunk = self._chunks(left[left > 0], self.limits.batch_tokens - num_verify)
        num_prefill = int(chunk.sum())
        shape = StepShape(len(decoding), num_verify, num_prefill, context)
        seconds = self._seconds(shape)
        self.now += seconds

        stood = np.minimum(accepted, lengths)
        emitted = np.minimum(1 + stood, self.remaining[decoding])
        self.remaining[decoding] -= emitted
        self.context[decoding] += emitted
        self.cursor[decoding] += 1
        self.prefill_left[pending] -= chunk
        self.context[pending] += chunk
        prefilled = pending[self.prefill_left[pending] == 0]
        self.first_s[prefilled] = self.now
        self.remaining[prefilled] -= 1
        self.recorder.step(
            end_s=self.now,
            seconds=seconds,
            shape=shape,
            emitted=int(emitted.sum()),
            first=len(prefilled),
            drafts=(int(lengths.sum()), int(stood.sum())),
            present=len(self.rows) + len(self.waiting),
        )
        self._finish()

    def _drafts(self, decoding: Ints, num_prefill: int, context: int) -> tuple[Ints, Ints]:
        """How many drafts of each decoding request are verified, and how many would stand at full width."""
        none = np.zeros(len(decoding), np.int64)
        table = self.acceptance
        if table is None or not len(decoding):
            return none, none
        index = self.trace_start[decoding] + self.cursor[decoding] % self.trace_length[decoding]
        accepted = table.accepted[index]
        if self.scheduler is None:
            return none + self.width, accepted
        if self.scheduler.confidence == "acceptance":
            confidence = (self.slots_up_to_width < accepted[:, None]).astype(float)
        else:
            recorded = table.confidence_by(self.scheduler.confidence)
            confidence = None if recorded is None else recorded[index]
        room = max(self.limits.batch_tokens - len(decoding), 0)
        load = Load(len(decoding), min(num_prefill, room), context, self.request_ids[decoding])
        lengths = self.scheduler.draft_lengths(confidence, load, num_draft_tokens=self.width)
        if lengths.min() < 0 or lengths.max() > self.width:
            raise ValueError(f"scheduler asks for {lengths.min()} to {lengths.max()} of {self.width} draft tokens")
        return lengths, accepted

    @staticmethod
    def _chunks(left: Ints, room: int) -> Ints:
        """Prompt tokens of this step, first come first served."""
        before = np.cumsum(left) - left
        return np.clip(room - before, 0, left)

    def _seconds(self, shape: StepShape) -> float:
        seconds = float(self.profile.verify_time_s(shape))
        if self.width and shape.num_requests:
            if shape.num_requests not in self.draft_s:
                self.draft_s[shape.num_requests] = self.profile.draft_time_s(num_requests=shape.num_requests)
            seconds += self.draft_s[shape.num_requests]
        if not 0 < seconds < np.inf:
            raise ValueError(f"hardware gives a step of {shape} {seconds} seconds: step times are positive")
        return seconds

    def _finish(self) -> None:
        """Take out the requests that have all their tokens."""
        running = self.remaining[self.rows] > 0
        if running.all():
            return
        for slot in self.rows[~running].tolist():
            request = self.requests[slot]
            assert request is not None
            self.recorder.request(request, first_s=float(self.first_s[slot]), end_s=self.now)
            self.free_bytes += self._bytes_of(request)
            self.free_slots.append(slot)
            following = self.workload.next_request(self.now, self.generator)
            if following is not None:
                self._ask(following)
        self.rows = self.rows[running]
