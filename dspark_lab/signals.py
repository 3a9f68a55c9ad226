"""How a process is told to end. SIGTERM and SIGUSR1 are what a scheduler sends before it takes a machine away.

The process then ends with ``REQUEUE`` (75, ``EX_TEMPFAIL`` of sysexits.h: "temporary failure, the user is invited to
retry"), so that a scheduler can tell "run the same command again" from an error (1) and from done (0): Slurm's
``RequeueExit=75`` or a line of the job script, a pod's failure policy. Training first saves a checkpoint at the end of the
step (``SaveOnSignal``); the other stages can be killed anywhere and keep what they have published.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

REQUEUE = os.EX_TEMPFAIL
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Requeue(SystemExit):
    """Leaves the process with ``REQUEUE``."""

    def __init__(self) -> None:
        super().__init__(REQUEUE)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """``handler`` for both signals while the block runs. Without effect outside the main thread, which gets no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, former in earlier.items():
            signal.signal(number, former)


def leave(number: int, frame: FrameType | None) -> None:
    """Handler of the stages that may be killed anywhere."""
    raise Requeue


def heed_only_parent(worker_id: int) -> None:
    """For a DataLoader worker: a signal to the whole job must not take the data of the step that is to be finished.

    Only the process that started the worker ends it by one, as torch does at the end of an iteration.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def watch() -> None:
        while signal.sigwaitinfo(SIGNALS).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="heed_only_parent").start()


def die_with_parent() -> None:
    """In a rank: end at once, with all children, when the process that launched it is gone, even by SIGKILL."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="die_with_parent").start()
