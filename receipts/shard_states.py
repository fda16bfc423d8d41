"""What operators see of the streams: how much is waiting in each shard, for how long, and who consumes it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import redis

import settings
from models.engine import autocommit, engine
from models.sql import sql
from receipts import kinds
from receipts.left_over_shards import stream_keys_in_use
from receipts.log_client import connected
from receipts.receipt import from_milliseconds

HOLDERS: Final = sql("""
    SELECT stream, holder, lease_until FROM ledger.shard_lease
    WHERE lease_until > (SELECT ledger.ledger_now())
""")


@dataclass(frozen=True, slots=True)
class GroupState:
    """A consumer group of a shard: entries that are being consumed, and who holds the shard for it."""

    group: str
    pending: int
    holder: str | None
    lease_until: datetime | None


@dataclass(frozen=True, slots=True)
class ShardState:
    """One shard of a stream."""

    stream: str
    length: int
    oldest_at: datetime | None  # when the oldest entry was accepted
    lag_seconds: float
    groups: list[GroupState]


def read_shards(*, answer_seconds: float = 5.0) -> list[ShardState]:
    """Return every shard of the receipt log, and those that are left over; raise ReceiptLogUnreachable."""
    with autocommit(engine()) as connection:
        holders = {stream: (holder, until) for stream, holder, until in connection.execute(HOLDERS)}
    with connected(answer_seconds=answer_seconds) as client:
        keys = list(stream_keys_in_use(client))
        pipeline = client.pipeline(transaction=False).time()
        for key in keys:
            pipeline.xlen(key).xrange(key, count=1).xinfo_groups(key)
        (seconds, microseconds), *answers = pipeline.execute(raise_on_error=False)
    now = seconds + microseconds / 1e6
    return [_shard(key, answers[3 * place :][:3], holders, now) for place, key in enumerate(keys)]


def waiting() -> int:
    """Return how many entries are in the streams; raise ReceiptLogUnreachable."""
    return sum(shard.length for shard in read_shards())


def _shard(key: str, answers: list[Any], holders: dict[str, tuple[str, datetime]], now: float) -> ShardState:
    length, first, groups = _value(answers[0]), _value(answers[1]), answers[2]
    oldest_at = from_milliseconds(first[0][0].partition("-")[0]) if first else None
    lag = max(0.0, now - oldest_at.timestamp()) if oldest_at else 0.0
    known = [] if isinstance(groups, redis.ResponseError) else groups  # an error: there is no such stream yet
    states = [
        GroupState(group["name"], group["pending"], *holders.get(f"{key}@{group['name']}", (None, None)))
        for group in known
    ]
    return ShardState(key, length, oldest_at, lag, states)


def _value(answer: Any) -> Any:
    """Return an answer of a pipeline; raise it if it is an error."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def wait_until_drained(seconds: float, *, pause_seconds: float = 0.2) -> Iterator[int]:
    """Yield how many entries are left, until there are none or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        left = waiting()
        yield left
        if not left or time.monotonic() > deadline:
            return
        time.sleep(pause_seconds)


def has_saver(shards: list[ShardState]) -> bool:
    """Return whether a saver holds a shard of the chats, so that accepted messages will be saved."""
    group = kinds.group_of(settings.current().receipt_group_save)
    return any(each.group == group and each.holder for shard in shards for each in shard.groups)
