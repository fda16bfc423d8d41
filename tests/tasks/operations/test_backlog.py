"""A backlog raises one alert per queue, is undone with hysteresis, and acts as BACKLOG_POLICY says."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest

import settings
from models.engine import engine
from models.sql import sql
from settings import SettingsError
from tasks import submit, ticks
from tasks.execution.deliver import deliver
from tasks.operations import backlog
from tasks.operations.scale import read_targets, report_size, set_scale
from tasks.submission.closed_queues import BacklogFull, QueuePaused
from tests.tasks.deliveries import scalar, submitted

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Any:
    def configure(**variables: str) -> None:
        for name, value in {"BACKLOG_ALERT_THRESHOLD": "10", **variables}.items():
            monkeypatch.setenv(name, value)
        settings.current.cache_clear()

    configure()
    return configure


def check() -> int:
    return backlog.check_backlog(engine(), settings.current())


def postpone(count: int) -> None:
    """Take due tasks out of the backlog."""
    due = "SELECT id FROM ledger.ingest_task WHERE next_retry_at IS NULL LIMIT :count"
    later = f"UPDATE ledger.ingest_task SET next_retry_at = ledger.ledger_now() + interval '1 h' WHERE id IN ({due})"
    with engine().begin() as connection:
        connection.execute(sql(later), {"count": count})


def alerts() -> dict[str, bool]:
    with engine().connect() as connection:
        return backlog.read_backlog_alerts(connection)


def test_an_alert_is_raised_above_the_threshold_and_cleared_below_eighty_percent(
    configure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    submitted(10)
    assert (check(), alerts()) == (0, {"ingest": False})
    submitted(1)
    with caplog.at_level(logging.WARNING):
        assert (check(), check(), alerts()) == (1, 0, {"ingest": True})  # raised once
    postpone(3)
    assert (check(), alerts()) == (0, {"ingest": True})  # 8 of 10: neither
    postpone(1)
    with caplog.at_level(logging.WARNING):
        assert (check(), alerts()) == (1, {"ingest": False})
    events = [record.event for record in caplog.records if hasattr(record, "event")]
    assert events == ["backlog_alert_raised", "backlog_alert_cleared"]


def test_only_due_tasks_count_with_and_without_a_partition_key(configure: Any) -> None:
    submitted(10, run_at=timedelta(hours=1))
    submitted(6)
    submitted(5, partition_key="a", run_at=timedelta(hours=1))
    assert check() == 0
    submitted(5, partition_key="a")
    assert check() == 1


def test_the_reclaim_tick_looks_at_the_backlog(configure: Any) -> None:
    submitted(11)
    assert ticks.run("reclaim")["backlogAlerts"] == 1
    assert alerts() == {"ingest": True}


def test_the_destination_is_told_when_the_alert_begins_and_ends(configure: Any) -> None:
    configure(OUTBOX_DESTINATIONS='{"pager": "redis-stream://127.0.0.1:1/0?stream=pager"}', BACKLOG_NOTIFY="pager")
    ids = submitted(11)
    check()
    deliver(engine(), ids)
    check()
    with engine().connect() as connection:
        found = connection.execute(
            sql("SELECT payload FROM ledger.outbox_event WHERE destination = 'pager' ORDER BY id")
        ).scalars()
        told = [(each["event"], each["queue"], each["waiting"], each["threshold"]) for each in found]
    assert told == [("backlog_alert_raised", "ingest", 11, 10), ("backlog_alert_cleared", "ingest", 0, 10)]


def test_a_destination_that_does_not_exist_stops_the_start(configure: Any) -> None:
    configure(BACKLOG_NOTIFY="nowhere")
    with pytest.raises(SettingsError, match="BACKLOG_NOTIFY must name a destination"):
        settings.current()
    configure(BACKLOG_NOTIFY="")


def test_refuse_closes_the_queue_until_the_alert_ends_and_an_operators_pause_is_named_first(configure: Any) -> None:
    configure(BACKLOG_POLICY="refuse")
    submitted(11)
    assert check() == 1
    with pytest.raises(BacklogFull, match="'ingest' takes no new tasks"):
        submit(engine(), "test.insert")
    with engine().begin() as connection:
        connection.execute(sql("INSERT INTO ledger.queue_pause (queue, intake) VALUES ('ingest', true)"))
    with pytest.raises(QueuePaused):
        submit(engine(), "test.insert")
    with engine().begin() as connection:
        connection.execute(sql("DELETE FROM ledger.queue_pause"))
    postpone(4)
    check()
    assert submit(engine(), "test.insert").created


def test_another_policy_applies_to_an_alert_that_exists(configure: Any) -> None:
    submitted(11)
    check()
    assert submit(engine(), "test.insert").created
    configure(BACKLOG_POLICY="refuse")
    assert check() == 0
    with pytest.raises(BacklogFull):
        submit(engine(), "test.insert")
    configure(BACKLOG_POLICY="alert")
    check()
    assert submit(engine(), "test.insert").created


def test_a_backlog_raises_the_target_and_the_operators_number_comes_back(configure: Any) -> None:
    configure(BACKLOG_POLICY="scale", BACKLOG_MAX_PROCESSES="6")

    def target() -> int | None:
        return report_size(engine(), worker="w", queues=["ingest", "system"], processes=1)

    set_scale(engine(), settings.current(), "ingest", 2, actor="op")
    ids = submitted(11)
    assert target() == 2
    check()
    assert target() == 6
    with engine().connect() as connection:
        assert read_targets(connection) == {"ingest": 6}
    deliver(engine(), ids)
    check()
    assert target() == 2
    set_scale(engine(), settings.current(), "ingest", None, actor="op")
    assert target() is None


def test_counting_stops_just_above_the_threshold(configure: Any) -> None:
    submitted(50)
    check()
    assert scalar("SELECT waiting FROM ledger.queue_alert") == 11
