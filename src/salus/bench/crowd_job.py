"""The jobs of `salus bench crowd`: python -m salus.bench.crowd_job SOCKET COUNT SECONDS

Many jobs, connected all at once, each from a thread of its own; each does short iterations for some seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from salus.client.connection import ServiceConnection
from salus.client.lease import Lease
from salus.protocol import messages as msg

ITERATION_S = 0.002


def one(path: Path, number: int, begin: threading.Barrier, seconds: float) -> None:
    launcher = ServiceConnection(path, None)
    asked = msg.Register(f"job{number}", ["crowd"], "/", weight=1 + number % 3, ephemeral_bytes=(number % 4) << 30)
    job = launcher.request(asked)
    lease = Lease(path, job.job_id, job.token)
    begin.wait()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        lease.begin()
        # Sleeps rather than computes: it is the service that is measured, and it wants a processor too.
        time.sleep(ITERATION_S)
        lease.end()
    launcher.send(msg.Finished(0))
    while not isinstance(launcher.receive()[0], msg.Done):
        pass
    launcher.close()


def main(path: Path, count: int, seconds: float) -> None:
    begin = threading.Barrier(count + 1)
    threads = [threading.Thread(target=one, args=(path, n, begin, seconds)) for n in range(count)]
    for thread in threads:
        thread.start()
    begin.wait()
    print("all are connected", flush=True)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
