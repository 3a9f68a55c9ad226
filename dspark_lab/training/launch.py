"""Starting the ranks of one machine, and ending them together.

torch's elastic agent was weighed. It hides a rank's exit code, kills ranks that need more than 30 s for their last
checkpoint, and leaves them running when it is itself killed; its restarts and rendezvous are not needed where the same
command goes on anyway. Groups over several machines are started with torchrun or srun.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from dspark_lab.nearby import LOOPBACK, free_port
from dspark_lab.signals import REQUEUE, Requeue, handled
from dspark_lab.training.place import GROUP_FOLDER

TAIL_LINES = 15


class RankError(RuntimeError):
    """A rank ended with an error; the message holds the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A running rank. Its standard input is a pipe that closes when this process dies; see ``signals.die_with_parent``."""

    index: int
    process: subprocess.Popen[bytes]
    log: Path
    copier: threading.Thread | None  # of rank 0's errors

    def end(self) -> None:
        """Kill it and its data workers, if they still run, and take in the rest of its output."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.copier is not None:
            self.copier.join()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def last_words(self) -> str:
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return f"rank {self.index} {how}; the last lines of {self.log}:\n" + "\n".join(f"    {line}" for line in lines)


def launch(command: Sequence[str], *, num_ranks: int, folder: Path, environment: Mapping[str, str]) -> None:
    """Run ``command`` as ``num_ranks`` processes of one group and wait for all.

    Rank 0 prints here; the others' output, and all errors, go to ``folder``/rank_<n>.log. SIGTERM and SIGUSR1 are passed
    on. However this ends, no rank is left. ``environment`` is added to their own.

    Raises:
        RankError: a rank failed; the others were killed.
        Requeue: the ranks left with ``REQUEUE``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    ranks: list[Rank] = []
    passed_on: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed_on.append(number)
        for rank in ranks:
            rank.process.send_signal(number)

    try:
        with handled(pass_on):
            for index in range(num_ranks):
                ranks.append(
                    _start(command, index, num_ranks=num_ranks, port=port, folder=folder, environment=environment)
                )
            ended = _wait(ranks)
    finally:
        for rank in ranks:
            rank.end()
    codes = {rank.process.returncode for rank in ended}
    # Killed by the signal: it came before training had begun, and there was nothing to save.
    if any(-number in codes for number in passed_on) or codes == {REQUEUE}:
        raise Requeue
    if codes:
        raise RankError("\n".join(rank.last_words() for rank in ended if rank.process.returncode != REQUEUE))


def _start(
    command: Sequence[str], index: int, *, num_ranks: int, port: int, folder: Path, environment: Mapping[str, str]
) -> Rank:
    log = folder / f"rank_{index}.log"
    threads = max(len(os.sched_getaffinity(0)) // num_ranks, 1)
    own = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        **environment,
        GROUP_FOLDER: str(folder),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "RANK": str(index),
        "LOCAL_RANK": str(index),
    }
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=None if index == 0 else file,
            stderr=subprocess.PIPE if index == 0 else file,
            env=own,
            start_new_session=True,  # a terminal's Ctrl-C comes to this process alone, which then ends all ranks
        )
    copier = None
    if process.stderr is not None:
        copier = threading.Thread(target=_copy, args=(process.stderr, log), daemon=True)
        copier.start()
    return Rank(index, process, log, copier)


def _copy(stream: IO[bytes], log: Path) -> None:
    """Rank 0's errors: to its log, and to our own."""
    with stream, log.open("ab", buffering=0) as file:
        for line in stream:
            file.write(line)
            sys.stderr.write(line.decode(errors="replace"))


def _wait(ranks: Sequence[Rank]) -> list[Rank]:
    """Until all ranks are done, or one has failed; returns those that ended otherwise than well."""
    while True:
        codes = [rank.process.poll() for rank in ranks]
        bad = [rank for rank, code in zip(ranks, codes, strict=True) if code not in (None, 0)]
        if None not in codes or any(rank.process.returncode != REQUEUE for rank in bad):
            return bad
        time.sleep(0.1)
