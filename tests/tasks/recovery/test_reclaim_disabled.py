"""INGEST_RECLAIM_ENABLED=false: expired leases stay with their holders, and lost wake-ups are sent all the same."""

from __future__ import annotations

import os

import pytest
import redis

import settings
from models.engine import engine
from outbox.after_commit_publisher import after_commit_publisher
from tasks import ticks
from tasks.core.holders import holder_of
from tasks.recovery.tick_rows import record_tick
from tasks.worker_watch import WorkerWatch
from tests.outbox.ledger import arrived, move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import claimed, submitted
from tests.tasks.lost_workers import LEASE, later
from tests.tasks.work import rows

pytestmark = pytest.mark.usefixtures("ledger")


def reclaim_enabled(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("INGEST_RECLAIM_ENABLED", value)
    settings.current.cache_clear()


def test_an_expired_lease_is_reclaimed_only_if_it_is_enabled(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    reclaim_enabled(monkeypatch, "false")
    claimed(submitted(1))
    for _ in range(2):
        later(ledger, LEASE + 1)
        ticks.run("reclaim")
        assert rows() == [("RUNNING", 0)]
    reclaim_enabled(monkeypatch, "true")
    with engine().begin() as connection:
        record_tick(connection, "reclaim", holder="test")
    ticks.run("reclaim")
    assert rows("status, attempt_count, error_code") == [("RETRYING", 1, "worker_lost")]


def test_the_lease_of_a_killed_child_is_reclaimed_only_if_it_is_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    reclaim_enabled(monkeypatch, "false")
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    claimed(submitted(1), holder=holder_of(pid))
    watch = WorkerWatch(lambda: {pid}, runs_ticks=False)
    watch.check()
    assert rows() == [("RUNNING", 0)]
    reclaim_enabled(monkeypatch, "true")
    watch.check()
    assert rows("status, error_code") == [("RETRYING", "worker_lost")]


def test_lost_wakeups_are_sent_again_although_it_is_disabled(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    reclaim_enabled(monkeypatch, "false")
    ids = submitted(3)
    assert after_commit_publisher().wait_until_idle(20)
    with redis.Redis.from_url(ledger.addresses["BROKER_URL"]) as client:
        client.flushall()
    move(ledger, settings.current().ingest_wakeup_grace_ms / 1000 + 1)
    assert ticks.run("reclaim") == {"expired": 0, "wokenAgain": 3, "backlogAlerts": 0}
    assert after_commit_publisher().wait_until_idle(20)
    assert arrived(ledger) == {str(each): 1 for each in ids}
