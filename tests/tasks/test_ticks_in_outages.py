"""While a server is unreachable, the ticks of beat are one log line, and not one with a stack every second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import settings
from models.ledger_outage import outage
from tasks import ticks
from tasks.beat import TickScheduler
from tasks.celery import app
from tests.servers import ServersOfTests
from tests.tasks.celery_settings import application
from tests.tasks.deliveries import raising
from tests.tasks.work import OnPurpose

UNREACHABLE = "postgresql://celeriac@127.0.0.1:1/nothing"
NO_BROKER = "redis://127.0.0.1:1/0"


@pytest.fixture
def answered() -> Iterator[None]:
    """Begin and end without an outage, because its state belongs to the process."""
    outage.note_answer()
    yield
    outage.note_answer()


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "event", "") for record in caplog.records]


def sent_by_beat() -> dict[str, Any]:
    """Return the Celery tasks that beat sends, by name."""
    app.loader.import_default_modules()
    names = {entry["task"] for entry in app.conf.beat_schedule.values()}
    return {name: app.tasks[name] for name in names}


@pytest.mark.usefixtures("answered")
def test_every_tick_skips_an_outage_of_the_ledger_and_the_process_logs_it_once(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "true")
    found = sent_by_beat()
    with monkeypatch.context() as changed:
        changed.setenv("DATABASE_URL", UNREACHABLE)
        settings.current.cache_clear()
        for tick in 2 * list(found.values()):
            tick()
    assert events(caplog) == ["ledger_down"]
    settings.current.cache_clear()
    found["tasks.tally"]()
    assert events(caplog) == ["ledger_down", "ledger_up"]


def test_a_tick_that_fails_for_another_reason_fails_with_its_stack(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticks, "reclaim_leases", raising(OnPurpose("no")))
    with pytest.raises(OnPurpose):
        sent_by_beat()["tasks.reclaim"]()


def test_beat_logs_an_outage_of_the_broker_once_and_goes_on_afterwards(
    ledger: ServersOfTests, caplog: pytest.LogCaptureFixture
) -> None:
    with application(NO_BROKER) as unreachable:
        scheduler = TickScheduler(unreachable)
        entries = list(scheduler.schedule.values())[:2]
        assert entries
        for _ in range(2):
            for entry in entries:
                scheduler.apply_entry(entry)
        assert events(caplog) == ["ticks_not_sent"]
        assert "\n" not in caplog.messages[0]
    with application(settings.current().broker_url) as reachable:
        scheduler.app = reachable
        for entry in entries:
            scheduler.apply_entry(entry)
    assert events(caplog) == ["ticks_not_sent", "ticks_sent_again"]
