"""Save and deliver accepted messages in this process or in one that dies, and check the ledger independently of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import redis

import settings
from models.engine import engine
from models.receipts import Level
from models.sql import sql
from receipts import deliver, kinds, log_client, save, shard_consumers
from receipts.kinds import stream_keys
from receipts.receipt import Receipt
from receipts.streams.consume import ShardRun, consume_together
from receipts.streams.consumers import Shard
from receipts.streams.overlapped_run import OverlappedRun
from receipts.streams.shard_lease import ShardLease
from tests.outbox.ledger import move
from tests.receipts.receiving import Receiving
from tests.servers import ServersOfTests
from tests.tasks.lost_workers import start_child

SECONDS = 30.0
RECEIPTS = sql("SELECT id, kind FROM ledger.receipt WHERE level = :level ORDER BY seq")
EFFECTS = {
    kinds.CHAT: sql("SELECT id FROM ledger.chat_message"),
    kinds.TASKS: sql("SELECT id FROM ledger.ingest_task WHERE type NOT IN ('document.ingest', 'workflow.run')"),
    kinds.DOCUMENTS: sql("SELECT id FROM ledger.ingest_task WHERE type = 'document.ingest'"),
}


def save_all() -> None:
    """Save everything that waits, in every shard."""
    _consume_all(save.shards_of)


def deliver_all() -> None:
    """Deliver everything that waits, in every shard."""
    _consume_all(lambda number: [deliver.shard_of(number)])


def _consume_all(shards_of: Callable[[int], Sequence[Shard]]) -> None:
    with closing(log_client.connect()) as client:
        copy = partial(shard_consumers.copy_switches, client)
        for number in range(settings.current().receipt_shards):
            assert consume_together(shards_of(number), SECONDS, until_idle=True, every_second=copy), "not free"


def killed(work: Callable[[], None], failpoints: str) -> None:
    """Do something in a process that dies at a failpoint; assert that it did."""
    pid = start_child(work, failpoints=failpoints)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"it did not pass {failpoints}"


def time_passes(servers: ServersOfTests, client: Any, seconds: float = shard_consumers.LEASE_SECONDS + 1) -> None:
    """Let time pass for the leases of the ledger, and for the idle time of entries that were read."""
    move(servers, seconds)
    for key, group in groups(client):
        for entry in client.xpending_range(key, group, "-", "+", 10_000):
            idle = int(entry["time_since_delivered"] + seconds * 1000)
            how = {"idle": idle, "justid": True, "retrycount": entry["times_delivered"]}
            client.xclaim(key, group, entry["consumer"], 0, [entry["message_id"]], **how)


def groups(client: Any) -> Iterator[tuple[str, str]]:
    """Return every consumer group of every stream."""
    for key in stream_keys():
        if client.exists(key):
            for group in client.xinfo_groups(key):
                yield key, group["name"]


def ledger_ids(level: Level = Level.SAVED) -> list[Any]:
    """Return the ids of the receipts in the ledger, in the order of their numbers."""
    with engine().connect() as connection:
        return [id_ for id_, _ in connection.execute(RECEIPTS, {"level": level.value})]


def assert_once(receiving: Receiving, received: Iterable[Receipt]) -> None:
    """Assert that the receipts that clients got are those of the ledger, each with one effect, and nothing is left."""
    expected = {receipt.id: receipt.kind for receipt in received}
    with engine().connect() as connection:
        found = connection.execute(RECEIPTS, {"level": Level.SAVED.value}).all()
        assert Counter((id_, kind) for id_, kind in found) == Counter(expected.items())
        for kind, statement in EFFECTS.items():
            effects = Counter(connection.execute(statement).scalars())
            wanted = [id_ for id_, known in expected.items() if known == kind]
            if kind == kinds.DOCUMENTS:  # their tasks have other ids
                assert (len(effects), sum(effects.values())) == (len(wanted), len(wanted)), kind
            else:
                assert effects == Counter(wanted), kind
    assert_empty(receiving)


def assert_empty(receiving: Receiving) -> None:
    """Assert that no stream has an entry, and no group one that is not acknowledged."""
    assert receiving.is_empty(), receiving.streams()
    left = {place: receiving.client.xpending(*place)["pending"] for place in groups(receiving.client)}
    assert not any(left.values()), left


def shard_of(kind: str, number: int = 0, *, holder: str | None = None) -> Shard:
    """Return the shard from which a saver reads accepted messages of a kind."""
    (consumer,) = (each for each in save.consumers(number) if each.stream == kinds.accepted_stream(kind))
    return Shard.of(consumer, number, holder=holder)


def begin(holder: str | None = None, kind: str = kinds.CHAT) -> OverlappedRun:
    """Take a shard as this saver, for tests that go on step by step."""
    shard = shard_of(kind, holder=holder)
    lease = ShardLease.take(engine(), shard, seconds=10)
    assert lease, "the shard is not free"
    make_run = shard.consumer.make_run
    assert make_run is not None
    run: OverlappedRun = make_run(shard, lease)
    run.begin()
    return run


def begin_delivering() -> ShardRun:
    """Take the shard of the chats as a deliverer."""
    shard = deliver.shard_of(0)
    lease = ShardLease.take(engine(), shard, seconds=10)
    assert lease, "the shard is not free"
    run = ShardRun(shard, lease)
    run.begin()
    return run


def connect() -> Any:
    return redis.Redis.from_url(settings.current().redis_url, decode_responses=True)
