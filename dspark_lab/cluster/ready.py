"""``python -m dspark_lab.cluster.ready --deadline S [--memory ADMIN_URL BYTES] URL ...``: waits until services are ready.

Each URL has to answer 200, and Mooncake's segments have to have that much memory. It runs on the node that will use them,
so that it also finds an address that cannot be reached from there. Exit code 1 after the deadline, with what is not ready.
"""

import argparse
import sys
import time

from dspark_lab.nearby import answers
from dspark_lab.store.mooncake_admin import MasterUnreachableError, room

POLL_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--memory", nargs=2, metavar=("ADMIN_URL", "BYTES"))
    parser.add_argument("urls", nargs="*")
    given = parser.parse_args()
    end = time.monotonic() + given.deadline
    while waiting := not_ready(given.urls, given.memory):
        if time.monotonic() > end:
            sys.exit(f"error: not ready after {given.deadline:g} s: {', '.join(waiting)} (cluster.deadline_s)")
        time.sleep(POLL_S)


def not_ready(urls: list[str], memory: list[str] | None) -> list[str]:
    waiting = [url for url in urls if not answers(url)]
    if memory and not waiting and _capacity(memory[0]) < int(memory[1]):
        waiting.append(f"Mooncake's segments ({memory[0]})")
    return waiting


def _capacity(admin_url: str) -> int:
    try:
        return room(admin_url).capacity_bytes
    except MasterUnreachableError:
        return 0


if __name__ == "__main__":
    main()
