"""Separate servers for tests with real workers. Their clock is not moved; leases are short instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import TextClause

import settings
from bench.scratch import scratch_servers
from models.engine import engine
from tests.app import point_app_at
from tests.forgotten_counts import forget_counts

QUICK = {"INGEST_LEASE_SECONDS": "3", "INGEST_WAKEUP_GRACE_MS": "1000", "OUTBOX_SUBMIT_LEASE_SECONDS": "1"}


@contextmanager
def own_servers(variables: dict[str, str], create: TextClause) -> Iterator[settings.Settings]:
    """Start servers and create a table for effects; the variables are set for this process and its children."""
    before = dict(os.environ)
    os.environ.update(QUICK | variables)
    try:
        with scratch_servers() as current:
            forget_counts()
            point_app_at(current.broker_url)
            with engine().begin() as connection:
                connection.execute(create)
            yield current
    finally:
        os.environ.clear()
        os.environ.update(before)
        settings.current.cache_clear()
