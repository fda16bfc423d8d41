"""Publish the wake-ups that a command wrote before the command ends."""

# ruff: noqa: PLC0415 - SQLAlchemy loads slowly

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

PATIENCE_SECONDS: Final = 5.0


@contextmanager
def publish_wakeups() -> Iterator[None]:
    """Wait at the end until the wake-ups are published; those that take too long are left to the relay.

    A thread publishes them and needs Celery. Import it here first: two threads must not import Celery at once.
    """
    from outbox.after_commit_publisher import after_commit_publisher

    importlib.import_module("outbox.publishers.celery")
    try:
        yield
    finally:
        after_commit_publisher().wait_until_idle(PATIENCE_SECONDS)
