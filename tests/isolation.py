"""Keep the settings of the shell out of the tests, so that they use their own servers only."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

SERVERS = ("DATABASE_URL", "BROKER_URL", "REDIS_URL", "API_URL", "LOG_FORMAT")
PREFIXES = ("INGEST_", "OUTBOX_", "RECEIPT_", "CHECKPOINT_", "BACKLOG_", "FLOWER_", "API_", "KAFKA_", "CELERY_")


def isolate() -> None:
    """Remove our variables from the environment. Call this before anything reads the settings."""
    for name in list(os.environ):
        if name in SERVERS or name.startswith(PREFIXES):
            del os.environ[name]
    os.environ["CELERIAC_HOME"] = str(Path(tempfile.gettempdir()) / "celeriac-tests-without-a-stack")
    # In a script, `make test &` starts with SIGINT ignored; the programs that tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
