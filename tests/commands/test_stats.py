"""stats."""

from __future__ import annotations

from datetime import timedelta

import pytest

from models.engine import engine
from models.sql import sql
from tasks.core.registry import handlers
from tasks.execution.claim import claim
from tasks.execution.deliver import deliver
from tasks.operations import stats
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.command_line import DIES, FLAKY, buried, dead, manage, submitted


def test_stats_counts_by_status_queue_and_type_and_shows_the_oldest_due_task(stack: ServersOfTests) -> None:
    deliver(engine(), submitted({}, DIES, {"fail": 1}, {"discard": "why"}))
    (running,) = submitted({})
    with engine().begin() as connection:
        claim(connection, [running], handlers=handlers(), holder="w", lease_seconds=60)
    submitted({}, run_at=timedelta(days=1))
    move(stack, 3600)
    submitted({})
    found = manage("stats", "--json").json
    assert {each["status"]: (each["count"], each["exact"]) for each in found["statuses"]} == {
        "QUEUED": (2, True),
        "RUNNING": (1, True),
        "RETRYING": (1, True),
        "SUCCEEDED": (1, True),
        "DEAD": (1, True),
        "DISCARDED": (1, True),
    }
    (kind,) = found["kinds"]
    assert (kind["queue"], kind["type"], kind["due"], kind["scheduled"]) == ("ingest", FLAKY, 2, 1)
    assert kind["counts"] == {
        "QUEUED": 2,
        **dict.fromkeys(["RUNNING", "RETRYING", "SUCCEEDED", "DEAD", "DISCARDED"], 1),
    }
    assert 3590 < kind["oldestDue"] < 3700
    assert found["dead"] == [{"type": FLAKY, "errorCode": "permanent", "count": 1}]
    assert len(found["latest"]) == 7
    assert "demo.flaky" in manage("stats").out


def test_a_requeued_task_waits_since_its_requeue(stack: ServersOfTests) -> None:
    dead()
    move(stack, 3600)
    assert manage("requeue-dead", "--all").code == 0
    assert manage("stats", "--json").json["kinds"][0]["oldestDue"] < 600


def counted_by_status() -> dict[str, tuple[int, bool]]:
    return {each["status"]: (each["count"], each["exact"]) for each in manage("stats", "--json").json["statuses"]}


def test_counting_stops_at_the_ceiling_and_shows_it(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "CEILING", 5)
    monkeypatch.setattr(stats, "KIND_CEILING", 5)
    buried(7)
    submitted(*[{}] * 7)
    found = counted_by_status()
    assert (found["DEAD"], found["QUEUED"], found["RUNNING"]) == ((5, False), (5, False), (0, True))
    assert "≈ 5" in manage("stats").out
    with engine().begin() as connection:
        connection.execute(sql("ANALYZE ledger.ingest_task"))
    found = counted_by_status()
    assert (found["DEAD"], found["QUEUED"]) == ((7, False), (7, False)), "estimates"
