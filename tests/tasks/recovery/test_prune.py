"""Pruning: what is finished is kept for as long as the settings say, and no longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import settings
from models.engine import engine
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import Discard, ticks
from tasks.recovery.prune import prune
from tests.outbox.ledger import move
from tests.outbox.ledger import rows as events
from tests.servers import ServersOfTests
from tests.tasks.deliveries import delivered, handled, raising, submitted
from tests.tasks.work import rows

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")
HOURS = 5
TOMBSTONES = sql("SELECT count(*) FROM ledger.task_tombstone")


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def set_to_hours(name: str) -> None:
        monkeypatch.setenv(name, str(HOURS))
        settings.current.cache_clear()

    return set_to_hours


def pass_hours(ledger: ServersOfTests, hours: float) -> None:
    """Let time pass, to some minutes before or after the end of a retention."""
    move(ledger, hours * 3600)


def test_finished_tasks_are_kept_for_their_retention_and_dead_ones_beyond_it(
    ledger: ServersOfTests, setting: Callable[[str], None]
) -> None:
    setting("INGEST_SUCCEEDED_RETENTION_HOURS")
    delivered(submitted(1))
    with handled("test.discarded", raising(Discard("not needed"))):
        delivered(submitted(1, "test.discarded"))
    delivered(submitted(1, "test.fail", max_attempts=1))
    pass_hours(ledger, HOURS - 0.1)
    assert prune(engine(), settings.current()).tasks == 0
    pass_hours(ledger, 0.2)
    assert prune(engine(), settings.current()).tasks == 2
    assert rows("status") == [("DEAD",)]


def test_the_key_of_a_pruned_task_is_remembered_for_its_retention(
    ledger: ServersOfTests, setting: Callable[[str], None]
) -> None:
    setting("INGEST_SUCCEEDED_RETENTION_HOURS")
    setting("INGEST_TOMBSTONE_RETENTION_HOURS")
    delivered(submitted(1, key="k"))
    pass_hours(ledger, HOURS + 0.1)
    assert prune(engine(), settings.current()).tasks == 1
    for hours, remembered in ((HOURS - 0.1, 1), (0.2, 0)):
        pass_hours(ledger, hours)
        prune(engine(), settings.current())
        with engine().connect() as connection:
            assert connection.execute(TOMBSTONES).scalar_one() == remembered


def test_sent_events_are_kept_for_their_retention(ledger: ServersOfTests, setting: Callable[[str], None]) -> None:
    setting("OUTBOX_SENT_RETENTION_HOURS")
    submitted(1)
    assert after_commit_publisher().wait_until_idle(20)
    assert events("status") == [("SENT",)]
    pass_hours(ledger, HOURS - 0.1)
    assert ticks.run("prune")["events"] == 0
    pass_hours(ledger, 0.2)
    assert ticks.run("prune")["events"] == 1
    assert events("status") == []
