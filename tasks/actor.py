"""Who does it, for the ledger: this host and process."""

from __future__ import annotations

import os
import socket


def actor() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
