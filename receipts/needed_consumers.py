"""Which consumers of streams are needed now."""

from __future__ import annotations

from collections.abc import Iterator

import redis

import settings
from models.engine import autocommit, engine
from receipts import kinds
from receipts.streams.consumers import all_shards
from receipts.switches import read_switches
from tasks.core.registry import handlers


def needed_consumers() -> Iterator[str]:
    """Return the names of the Celery tasks, without `receipts.`, that must run.

    Savers and deliverers are needed while two-phase receipts are on, and afterwards until the streams are empty.
    """
    with autocommit(engine()) as connection:
        switches = read_switches(connection)
    if switches.two_phase or (switches.was_two_phase and has_entries()):
        yield "save"
        yield "deliver"
    handlers()  # imports INGEST_HANDLERS, which may register consumers
    if any(all_shards()):
        yield "consume"


def has_entries() -> bool:
    """Return whether a stream of the receipt log has entries; True if Redis cannot be asked."""
    try:
        with redis.Redis.from_url(settings.current().redis_url, socket_timeout=5, socket_connect_timeout=5) as client:
            return any(client.xlen(key) for key in stream_keys())
    except redis.RedisError:
        return True


def stream_keys() -> Iterator[str]:
    """Return the key of every shard of every stream of the receipt log."""
    current = settings.current()
    for stream in (*map(kinds.accepted_stream, kinds.SAVERS), current.receipt_stream_to_save):
        for number in range(current.receipt_shards):
            yield kinds.shard_key(stream, number)
