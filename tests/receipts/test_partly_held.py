"""A saver whose streams are not all free at its start: it takes the others over as soon as they are."""

from __future__ import annotations

from models.engine import engine
from receipts import kinds
from receipts.save import save_any_shard, shards_of
from receipts.streams.shard_lease import ShardLease
from tasks.submission.envelope import NewTask
from tests.receipts.receiving import Receiving
from tests.tasks.deliveries import scalar


def test_a_stream_that_is_leased_at_the_start_is_saved_when_its_lease_has_expired(receiving: Receiving) -> None:
    """The leases of a killed saver expire one after the other; the next one must not skip a stream for a whole run."""
    stream = kinds.accepted_stream(kinds.TASKS)
    (leased,) = (shard for shard in shards_of(0) if shard.consumer.stream == stream)
    assert ShardLease.take(engine(), leased, seconds=0.5)
    receipt = receiving.task(NewTask("demo.flaky", {"n": 1}))
    assert save_any_shard(2.5)
    assert scalar("SELECT count(*) FROM ledger.ingest_task WHERE id = :id", id=receipt.id) == 1
