"""Who does it, for the ledger: this host and process."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Final

HOST: Final = socket.gethostname()
# Containers may share a host name, and each has a process 12. Children of a worker inherit this, forked or started.
WORKER_VARIABLE: Final = "CELERIAC_WORKER"
WORKER: Final = os.environ.get(WORKER_VARIABLE) or secrets.token_hex(3)


def actor() -> str:
    return f"{HOST}:{os.getpid()}"


def holder_of(pid: int) -> str:
    """As a child of this worker calls itself in its leases: nobody else may be taken for it."""
    return f"{HOST}:{pid}-{WORKER}"
