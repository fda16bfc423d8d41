"""Temporary servers for one measurement, with the durable configuration of the embedded stack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import settings
from embedded.temporary_servers import environment, temporary_servers


@contextmanager
def scratch_servers(*, stream: str | None = None) -> Iterator[settings.Settings]:
    """Point this process at temporary servers until the end of the block. `stream` becomes an outbox destination."""
    with temporary_servers() as servers:
        variables = servers.variables
        if stream:
            address = servers.addresses["REDIS_URL"].replace("redis://", "redis-stream://", 1)
            variables["OUTBOX_DESTINATIONS"] = json.dumps({stream: f"{address}?stream={stream}"})
        with environment(variables):
            yield settings.current()
