"""Which consumers of streams are needed now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import redis

import settings
from models.engine import autocommit, engine
from receipts import kinds
from receipts.streams.consumers import all_shards
from receipts.switches import read_switches
from tasks.core.registry import handlers

ANSWER_SECONDS: Final = 2.0


def needed_consumers() -> Iterator[str]:
    """Return the names of the Celery tasks, without `receipts.`, that must run.

    Savers and deliverers are needed while two-phase receipts are on, and afterwards until the streams are empty. The
    ledger may know of no receipt although messages were accepted, if it was down before the setting was switched off.
    """
    with autocommit(engine()) as connection:
        switches = read_switches(connection)
    if switches.two_phase or has_entries(if_unknown=switches.was_two_phase):
        yield "save"
        yield "deliver"
    handlers()  # imports INGEST_HANDLERS, which may register consumers
    if any(all_shards()):
        yield "consume"


def has_entries(*, if_unknown: bool) -> bool:
    """Return whether a stream of the receipt log has entries, or `if_unknown` if Redis cannot be asked."""
    try:
        url = settings.current().redis_url
        with redis.Redis.from_url(
            url, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS, retry=None
        ) as client:
            return any(client.xlen(key) for key in stream_keys())
    except (redis.RedisError, settings.SettingsError):
        return if_unknown


def stream_keys() -> Iterator[str]:
    """Return the key of every shard of every stream of the receipt log."""
    current = settings.current()
    for stream in (*map(kinds.accepted_stream, kinds.SAVERS), current.receipt_stream_to_save):
        for number in range(current.receipt_shards):
            yield kinds.shard_key(stream, number)
