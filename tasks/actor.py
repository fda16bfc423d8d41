"""Who does it, for the ledger: this host and process."""

from __future__ import annotations

import os
import socket
from typing import Final

HOST: Final = socket.gethostname()


def actor() -> str:
    return f"{HOST}:{os.getpid()}"
