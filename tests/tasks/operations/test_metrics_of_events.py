"""Figures of a scrape that rare events change: publishes by their result, leases that cannot be reclaimed, claims."""

from __future__ import annotations

import dataclasses
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

import settings
from models.engine import engine
from models.sql import sql
from outbox.lease import ClaimedEvent
from outbox.publishers.contract import Failed, Result, Sent
from outbox.relay import Relay
from tally.counts import counts
from tasks import ticks
from tasks.core import registry
from tasks.core.registry import handlers
from tasks.operations import installation_metrics
from tests.outbox.ledger import insert, move
from tests.outbox.scripted import scripted
from tests.servers import ServersOfTests
from tests.tasks.deliveries import claimed, submitted
from tests.tasks.lost_workers import LEASE, later

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")
SLOW_SECONDS = 0.2
GOOD = sql("""
    UPDATE ledger.outbox_event SET payload = '{"type": "good"}' WHERE id = (SELECT min(id) FROM ledger.outbox_event)
""")


def value(name: str, **labels: str) -> float:
    families = text_string_to_metric_families(installation_metrics.exposition().decode())
    found = [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(found)


def test_each_publish_is_counted_and_timed_by_its_result(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOX_MAX_ATTEMPTS", "2")
    settings.current.cache_clear()
    relay = Relay.of(settings.current())

    def publish(event: ClaimedEvent) -> Result:
        time.sleep(SLOW_SECONDS)
        return Sent() if event.payload["type"] == "good" else Failed("answered 500")

    scripted(relay, "hook", publish)
    insert("hook", 2)
    with engine().begin() as connection:
        connection.execute(GOOD)
    move(ledger, 30)
    for _ in range(2):
        relay.tick()
        move(ledger, 60)
    relay.close()
    counts.append()
    ticks.run("tally")
    for result in ("success", "failure", "dead"):
        assert value("outbox_publish_total", result=result, destination="hook") == 1, result
        assert value("outbox_publish_seconds_count", result=result) == 1, result
        assert value("outbox_publish_seconds_sum", result=result) >= SLOW_SECONDS, result
    assert value("outbox_publish_delay_seconds_count") == 1
    assert 30 <= value("outbox_publish_delay_seconds_sum") < 60


def test_running_tasks_are_pending_and_a_lease_that_cannot_be_reclaimed_is_counted_as_an_error(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed(submitted(1))
    assert value("ingest_stream_pending", stream="ingest", group="ingest-workers") == 1
    endless = dataclasses.replace(handlers()["test.insert"], backoff=(1e18,))
    with monkeypatch.context() as broken:
        broken.setitem(registry._registered, "test.insert", endless)
        later(ledger, LEASE + 1)
        ticks.run("reclaim")
    counts.append()
    assert value("ingest_stream_reclaim_total", result="error") == 1
    later(ledger, 1)
    ticks.run("reclaim")
    counts.append()
    assert value("ingest_stream_reclaim_total", result="error") == 1
    assert value("ingest_stream_reclaim_total", result="claimed") == 1
    assert value("ingest_stream_pending", stream="ingest", group="ingest-workers") == 0
