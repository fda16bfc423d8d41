"""Whatever the shell has set, tests talk to their own servers only, and what they start can be interrupted."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

SERVERS = ("DATABASE_URL", "BROKER_URL", "REDIS_URL", "API_URL", "LOG_FORMAT")
PREFIXES = ("INGEST_", "OUTBOX_", "RECEIPT_", "CHECKPOINT_", "BACKLOG_", "FLOWER_", "API_", "KAFKA_", "CELERY_")


def isolate() -> None:
    """To be called before anything reads the settings."""
    for name in list(os.environ):
        if name in SERVERS or name.startswith(PREFIXES):
            del os.environ[name]
    os.environ["CELERIAC_HOME"] = str(Path(tempfile.gettempdir()) / "celeriac-tests-without-a-stack")
    # A script that says `make test &` ignores SIGINT for all of it, and so would every program that a test ends by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
