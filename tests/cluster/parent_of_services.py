"""A run that starts a service and waits to be killed. Prints the pids that must not outlive it."""

import os
import sys
import time
from pathlib import Path

from dspark_lab.cluster.services import MooncakeMaster, Service
from dspark_lab.progress import console

# A server with a helper that ignores SIGTERM, as engines have them.
SERVER = """
import os, signal, subprocess, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(600)
"""


def main(kind: str, folder: Path) -> None:
    if kind == "mooncake_master":
        service = MooncakeMaster(folder=folder)
        print("ready", service.address, flush=True)
    elif kind == "cluster":
        from test_local import ASKED, address, local_cluster

        console.quiet = True  # only "ready" is told
        cluster = local_cluster(folder)
        (url,) = cluster.engine(Path("/m"), layer_ids=(1, 4), **ASKED)
        watchers = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        servers = [pid for w in watchers for pid in Path(f"/proc/{w}/task/{w}/children").read_text().split()]
        print("ready", address(url), cluster.mooncake().master_address, *servers, flush=True)
    else:
        service = Service("server", [sys.executable, "-c", SERVER], folder=folder)
        service.wait_ready(lambda: len(service.log.read_text().split()) == 2, deadline_s=20)
        print("ready", *service.log.read_text().split(), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
