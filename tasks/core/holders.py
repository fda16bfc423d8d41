"""Names of processes in the ledger: actors of transitions, and holders of leases."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Final

HOST: Final = socket.gethostname()
# Containers may share a host name, and their process ids are equal. The children of a worker inherit this variable.
WORKER_VARIABLE: Final = "CELERIAC_WORKER"
WORKER: Final = os.environ.get(WORKER_VARIABLE) or secrets.token_hex(3)


def actor() -> str:
    """Return the name of this process as the actor of a transition."""
    return f"{HOST}:{os.getpid()}"


def holder_of(pid: int) -> str:
    """Return the name under which a child of this worker holds its leases. No process of another worker has it."""
    return f"{HOST}:{pid}-{WORKER}"


def origin_of(holder: str) -> tuple[str, str]:
    """Return the host and the worker in a name of `holder_of`: the same for all processes of a worker."""
    host, _, process = holder.rpartition(":")
    return host, process.partition("-")[2] or process
