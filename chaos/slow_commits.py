"""Run a proxy in front of PostgreSQL in which every COMMIT takes longer: `python -m chaos.slow_commits MILLISECONDS`.

It reads the address of the server from DATABASE_URL, writes the port on which it listens into the file that
CELERIAC_READY_FILE names, and ends at SIGTERM. It is a process of its own, so that its threads do not slow down the
program that measures.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from chaos.fault_proxy import COMMIT, FaultProxy
from child_process import READY_FILE


def main() -> None:
    (milliseconds,) = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # before the threads start, which inherit it
    with FaultProxy(os.environ["DATABASE_URL"]) as proxy:
        proxy.delay(COMMIT, float(milliseconds) / 1000)
        ready = Path(os.environ[READY_FILE])
        beside = ready.with_suffix(".port")
        beside.write_text(str(proxy.port))
        beside.replace(ready)  # the port is complete when the file is there
        signal.sigwait([signal.SIGTERM])


if __name__ == "__main__":
    main()
