"""Servers for one measurement: durable like the real ones, and gone afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import settings
from embedded.temporary_servers import environment, scratch


@contextmanager
def scratch_servers(*, stream: str | None = None) -> Iterator[settings.Settings]:
    """This process talks to servers of its own until the end of the block. `stream` becomes a destination."""
    with scratch() as servers:
        variables = servers.variables
        if stream:
            address = servers.addresses["REDIS_URL"].replace("redis://", "redis-stream://", 1)
            variables["OUTBOX_DESTINATIONS"] = json.dumps({stream: f"{address}?stream={stream}"})
        with environment(variables):
            yield settings.current()
