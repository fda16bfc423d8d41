"""Figures that rare events change: publishes by their result, leases that are lost or cannot be reclaimed, claims."""

from __future__ import annotations

import dataclasses
import time
from datetime import timedelta

import pytest
from prometheus_client import REGISTRY
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
from tasks.execution.heartbeat import heartbeat
from tasks.operations import installation_metrics
from tests.outbox.ledger import insert, move
from tests.outbox.scripted import scripted
from tests.servers import ServersOfTests
from tests.tasks.deliveries import claimed, delivered, handled, submitted
from tests.tasks.lost_workers import LEASE, later
from tests.tasks.pausing import pause

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")
SLOW_SECONDS = 0.2
GOOD = sql("""
    UPDATE ledger.outbox_event SET payload = '{"type": "good"}' WHERE id = (SELECT min(id) FROM ledger.outbox_event)
""")
TAKE = sql("DELETE FROM ledger.task_lease WHERE token = :token")


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


def of_program(name: str, label: str) -> dict[str, float]:
    """Return the values of a counter of this program, by a label."""
    (family,) = (each for each in REGISTRY.collect() if each.name == name)
    return {sample.labels[label]: sample.value for sample in family.samples if sample.name.endswith("_total")}


def test_a_program_counts_its_claims_by_verdict(ledger: ServersOfTests) -> None:
    before = of_program("celeriac_process_claims", "verdict")
    done = submitted(3)
    delivered(done)
    delivered(done[:2])
    delivered(submitted(1, run_at=timedelta(hours=1)))
    with handled("test.gone", lambda _task, _db: None):
        unhandled = submitted(4, "test.gone")
    delivered(unhandled)
    pause()
    delivered(submitted(5))
    after = of_program("celeriac_process_claims", "verdict")
    found = {verdict: now - before.get(verdict, 0) for verdict, now in after.items()}
    assert found == {"run": 3, "skipped": 2, "not_due": 1, "unhandled": 4, "paused": 5}


def test_a_program_counts_the_leases_that_it_renews_and_those_that_it_has_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept, lost = claimed(submitted(1)), claimed(submitted(1))
    lost.lease.running, lost.lease.hard_limit_at = lost.tasks[0], time.monotonic() + 60  # its handler runs
    with heartbeat().holding(kept.lease), heartbeat().holding(lost.lease):
        with engine().begin() as connection:
            connection.execute(TAKE, {"token": lost.token})
        before = of_program("celeriac_process_lease_renewals", "result")
        heartbeat().beat()
        after = of_program("celeriac_process_lease_renewals", "result")
    assert {result: now - before.get(result, 0) for result, now in after.items()} == {"renewed": 1, "lost": 1}
    (record,) = [vars(record) for record in caplog.records if getattr(record, "event", "") == "lease_lost"]
    id_ = lost.tasks[0].id
    assert (record["taskId"], record["type"], record["traceId"]) == (str(id_), "test.insert", id_.hex)


def test_the_wait_of_the_oldest_due_task_is_shown_for_its_queue(ledger: ServersOfTests) -> None:
    assert value("celeriac_task_oldest_due_seconds", queue="ingest") == 0
    submitted(1, run_at=timedelta(seconds=40))
    move(ledger, 30)
    assert value("celeriac_task_oldest_due_seconds", queue="ingest") == 0, "it is not due yet"
    move(ledger, 70)
    assert 60 <= value("celeriac_task_oldest_due_seconds", queue="ingest") < 90
