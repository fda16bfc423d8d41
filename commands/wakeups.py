"""Wake-ups that a command wrote leave before it ends; what does not leave in time is the relay's."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

PATIENCE_SECONDS: Final = 5.0


@contextmanager
def publish_wakeups() -> Iterator[None]:
    """They are published by a thread, which needs Celery: loaded here, since Celery cannot be loaded by two at once."""
    from outbox.after_commit_publisher import submitter  # noqa: PLC0415 - loads SQLAlchemy

    importlib.import_module("outbox.publishers.celery")
    try:
        yield
    finally:
        submitter().flush(PATIENCE_SECONDS)
