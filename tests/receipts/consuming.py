"""Add entries to a stream, consume them in this process or in one that dies, and look at what is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import redis

import failpoint
import metrics
import settings
from models.engine import engine
from models.sql import sql
from receipts.streams.consume import ShardRun, consume
from receipts.streams.consumers import Shard, StreamConsumer
from receipts.streams.entries import Batch
from receipts.streams.shard_lease import ShardLease
from sinks.recovery import recover
from tests.outbox.ledger import move
from tests.receipts.places import STREAM, StreamPlace
from tests.servers import ServersOfTests
from tests.tasks.lost_workers import start_child

GROUP = "save"
CLAIM_IDLE_SECONDS = 60.0
OFFSETS = sql("SELECT sink_committed FROM ledger.checkpoint ORDER BY id")
LEASES = sql("SELECT count(*) FROM ledger.shard_lease WHERE lease_token IS NOT NULL")


class StreamUnderTest:
    """One shard of a stream, whose handler writes to a place."""

    def __init__(
        self, servers: ServersOfTests, place: StreamPlace, *, handler: Callable[[Batch], object] | None = None
    ) -> None:
        self.servers = servers
        self.place = place
        self.client: Any = redis.Redis.from_url(servers.addresses["REDIS_URL"], decode_responses=True)
        self.consumer = StreamConsumer(GROUP, STREAM, handler or place.handle, sinks=(place.name,))

    def add(self, *numbers: int, **fields: str) -> list[str]:
        return [self.client.xadd(STREAM, {"n": n, **fields}) for n in numbers]

    def shard(self, holder: str | None = None) -> Shard:
        return Shard.of(self.consumer, 0, holder=holder)

    def consume(self, holder: str | None = None) -> bool:
        """Consume everything that waits."""
        return consume(self.shard(holder), 30, until_idle=True)

    def begin(self, holder: str) -> ShardRun:
        """Take the shard as this consumer, for tests that go on step by step."""
        shard = self.shard(holder)
        lease = ShardLease.take(engine(), shard, seconds=CLAIM_IDLE_SECONDS)
        assert lease
        run = ShardRun(shard, lease)
        run.begin()
        return run

    def killed(self, failpoints: str) -> None:
        """Consume in a process that dies at a failpoint; assert that it did."""
        pid = start_child(lambda: void(self.consume()), failpoints=failpoints)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"it did not pass {failpoints}"

    def raised(self, failpoints: str) -> None:
        """Consume while a failpoint raises; assert that it did."""
        failpoint.arm(failpoints)
        try:
            self.consume()
        except failpoint.FailpointHit:
            return
        finally:
            failpoint.arm()
        raise AssertionError(f"it did not pass {failpoints}")

    def time_passes(self, seconds: float = CLAIM_IDLE_SECONDS + 1) -> None:
        """Let time pass for the ledger's leases, and for the idle time of unacknowledged entries in Redis."""
        move(self.servers, seconds)
        for entry in self.unacknowledged():
            idle = int(entry["time_since_delivered"] + seconds * 1000)
            how = {"idle": idle, "justid": True, "retrycount": entry["times_delivered"]}
            self.client.xclaim(STREAM, GROUP, entry["consumer"], 0, [entry["message_id"]], **how)

    def finish(self) -> None:
        """Let another consumer and recovery do the rest, as they would after a crash."""
        self.time_passes()
        assert self.consume("another")
        recover(engine())
        assert self.consume("another")

    def unacknowledged(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.xpending_range(STREAM, GROUP, "-", "+", 1000)
        return found

    def is_quiet(self) -> bool:
        """Return True if nothing is left to do: no entry, checkpoint, lease or transaction."""
        with engine().begin() as connection:
            committed = list(connection.scalars(OFFSETS))
            leases = connection.scalar(LEASES)
        return (self.unacknowledged(), committed, leases, self.place.left_behind()) == ([], [True], 0, [])


def point_at(servers: ServersOfTests, **addresses: str) -> None:
    """Replace addresses of servers."""
    servers.home.write_stack({**servers.addresses, "DATABASE_URL": settings.current().database_url, **addresses})
    settings.current.cache_clear()


def void(_: object) -> None:
    """Drop a result."""


def checkpoints(result: str) -> float:
    """Return the value of `celeriac_checkpoint_total`."""
    return float(metrics.CHECKPOINT_TOTAL.labels(result)._value.get())


def consume_until_idle(run: ShardRun) -> None:
    """Let a consumer do all that there is to do."""
    run.step()
    while run.has_found:
        run.step()
    run.commit_rest()
