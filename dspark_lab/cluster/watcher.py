"""Runs one command in a process group of its own and ends the group when the parent is gone, however it died.

A script for the standard library alone, so that it starts quickly in any environment:
``python -I watcher.py <parent's pid> <seconds to end> <command> ...``. SIGTERM ends the group too; its exit status is the
command's.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

PERIOD_S = 0.1


def watch(parent: int, grace_s: float, command: list[str]) -> int:
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it stops its services in order
    child = subprocess.Popen(command, start_new_session=True)
    while child.poll() is None and not asked and os.getppid() == parent:
        time.sleep(PERIOD_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # also the command's own children that outlive it
    return child.wait()


if __name__ == "__main__":
    status = watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
    sys.exit(status if status >= 0 else 128 - status)
