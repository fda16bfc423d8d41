"""Lost wake-ups are sent again, and tasks that merely wait in a working queue are not woken again."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import redis

import settings
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from outbox.relay import Relay
from tasks import NewTask, submit_many
from tasks.core.registry import handlers
from tasks.execution.claim import claim
from tasks.execution.deliver import deliver
from tasks.recovery.lost_wakeups import repair
from tests.outbox.ledger import arrived, move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import handled, scalar
from tests.tasks.wakeup_repair import repair_lost_wakeups
from tests.tasks.work import effects, insert, rows, wakeups

GRACE = 10  # seconds, the default
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def submitted(count: int, type: str = "test.insert", **how: Any) -> list[uuid.UUID]:
    """Submit tasks whose wake-ups have reached the broker."""
    with sessions()() as session:
        ids = [each.task_id for each in submit_many(session, [NewTask(type, **how) for _ in range(count)])]
        session.commit()
    assert after_commit_publisher().wait_until_idle(20)
    return ids


def waited() -> float:
    """Return the longest time from the first wake-up of a task to its last one, in seconds."""
    return float(scalar("SELECT max(extract(epoch FROM last_wakeup_at - created_at)) FROM ledger.ingest_task"))


def flush_broker(stack: ServersOfTests) -> None:
    with redis.Redis.from_url(stack.addresses["BROKER_URL"]) as client:
        client.flushall()


def test_all_wakeups_that_the_broker_lost_are_sent_again(ledger: ServersOfTests) -> None:
    with handled("test.hundred", insert, batch=100):
        ids = submitted(250, "test.hundred")
        flush_broker(ledger)
        assert repair_lost_wakeups(depth=None) == 0  # not yet
        move(ledger, GRACE + 1)
        assert repair_lost_wakeups(depth=None) == 250
        assert arrived(ledger) == {str(one): 1 for one in ids}
    assert [len(wakeup.ids) for wakeup in wakeups()[-3:]] == [100, 100, 50]


def test_a_wakeup_is_sent_again_after_the_grace_of_the_settings(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGEST_WAKEUP_GRACE_MS", "60000")
    settings.current.cache_clear()
    submitted(2)
    flush_broker(ledger)
    move(ledger, 50)
    assert repair_lost_wakeups(depth=None) == 0
    move(ledger, 11)
    assert repair_lost_wakeups(depth=None) == 2


def test_a_small_batch_size_of_reclaim_does_not_limit_the_search_for_lost_wakeups(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the tasks of a broker that lost everything would be woken one per tick."""
    monkeypatch.setenv("INGEST_RECLAIM_BATCH_SIZE", "1")
    settings.current.cache_clear()
    ids = submitted(250)
    flush_broker(ledger)
    move(ledger, GRACE + 1)
    assert settings.current().ingest_reclaim_batch_size == 1
    assert repair_lost_wakeups(depth=None) == 250
    assert arrived(ledger) == {str(one): 1 for one in ids}


def test_lost_wakeups_of_several_pages_are_sent_again_in_one_tick(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.recovery.lost_wakeups.PAGE", 100)
    ids = submitted(250)
    flush_broker(ledger)
    move(ledger, GRACE + 1)
    assert repair_lost_wakeups(depth=None) == 250
    assert arrived(ledger) == {str(one): 1 for one in ids}


@pytest.mark.parametrize(("overdue", "woken"), [(100, 130), (99, 99)], ids=["a full page", "less than a page"])
def test_after_a_page_of_lost_wakeups_younger_ones_do_not_wait_for_their_grace(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch, overdue: int, woken: int
) -> None:
    """Otherwise the drain after the loss of all messages would pause until the next tick."""
    monkeypatch.setattr("tasks.recovery.lost_wakeups.PAGE", 100)
    submitted(overdue)
    move(ledger, GRACE - 2)
    submitted(30)
    flush_broker(ledger)
    move(ledger, 3)
    assert repair_lost_wakeups(depth=None) == woken
    assert repair_lost_wakeups(depth=0) == 0  # none is woken twice


def test_wakeups_of_later_pages_that_are_lost_once_more_are_sent_once_more(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their time is not written into the tasks of later pages; the grace of the first page holds for them, too."""
    monkeypatch.setattr("tasks.recovery.lost_wakeups.PAGE", 100)
    ids = submitted(350)
    for _ in range(3):
        flush_broker(ledger)
        move(ledger, GRACE + waited() + 1)
        assert repair_lost_wakeups(depth=None) == 350
        assert repair_lost_wakeups(depth=0) == 0
        assert arrived(ledger) == {str(one): 1 for one in ids}


def test_tasks_that_wait_in_a_working_queue_are_not_woken_again(ledger: ServersOfTests) -> None:
    submitted(50)
    move(ledger, 100 * GRACE)
    assert repair_lost_wakeups(depth=None) == 0


def test_the_grace_doubles_with_each_wakeup(ledger: ServersOfTests) -> None:
    submitted(1)
    for _ in range(4):
        grace = GRACE + waited()
        move(ledger, grace - 5)
        flush_broker(ledger)
        assert repair_lost_wakeups(depth=None) == 0
        move(ledger, 5)
        assert repair_lost_wakeups(depth=None) == 1
    assert waited() > 15 * GRACE - 1


def test_a_wakeup_that_still_waits_in_the_outbox_is_not_lost(ledger: ServersOfTests) -> None:
    """A broker that was unreachable for 20 minutes causes no second wake-up."""
    submitted(3)
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.outbox_event SET status = 'NEW', sent_at = NULL"))
    flush_broker(ledger)
    move(ledger, 1200)
    assert repair_lost_wakeups(depth=None) == 0
    relay = Relay.of(settings.current())
    assert relay.tick().sent == 1
    relay.close()
    assert repair_lost_wakeups(depth=None) == 0


def test_a_task_whose_wakeup_is_dead_is_woken_again(ledger: ServersOfTests) -> None:
    submitted(1)
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.outbox_event SET status = 'DEAD', sent_at = NULL"))
    flush_broker(ledger)
    move(ledger, GRACE + 1)
    assert repair_lost_wakeups(depth=None) == 1


def test_a_task_that_was_overtaken_in_a_full_queue_is_woken_again(ledger: ServersOfTests) -> None:
    """Redis can lose the one message that it has handed to a worker that dies, while the queue keeps working."""
    (lost,) = submitted(1)
    move(ledger, 1)
    later = submitted(5)
    move(ledger, 1)
    waiting = submitted(1)
    with engine().begin() as connection:  # a batch of five has no room for the other tasks
        held = claim(connection, later, handlers=_narrow(5), holder="worker", lease_seconds=600)
    assert {task.id for task in held.tasks} == set(later)
    assert repair_lost_wakeups(depth=1) == 0  # the later tasks were claimed just now
    move(ledger, GRACE + 1)
    assert repair_lost_wakeups(depth=1) == 1  # they were claimed more than a grace ago
    assert wakeups()[-1].ids == [lost]
    assert waiting[0] not in wakeups()[-1].ids


def test_the_wakeup_of_a_scheduled_task_is_lost_only_after_its_time(ledger: ServersOfTests) -> None:
    submitted(1, run_at=timedelta(hours=1))
    flush_broker(ledger)
    move(ledger, 3000)
    assert repair_lost_wakeups(depth=None) == 0
    move(ledger, 601)
    relay = Relay.of(settings.current())
    assert relay.tick().sent == 1
    relay.close()
    assert repair_lost_wakeups(depth=None) == 0
    flush_broker(ledger)
    move(ledger, GRACE + 1)
    assert repair_lost_wakeups(depth=None) == 1


def test_a_task_without_a_handler_waits_and_is_not_charged(ledger: ServersOfTests) -> None:
    with engine().begin() as connection:
        id_ = connection.execute(sql("SELECT ledger.ingest_submit('not.yet.deployed', '{}')")).scalar_one()
    deliver(engine(), [id_])
    assert rows() == [("QUEUED", 0)]
    assert wakeups()[-1].due_at is not None
    assert effects() == {}


def test_the_broker_is_asked_only_if_a_task_is_overdue(ledger: ServersOfTests) -> None:
    submitted(3)
    assert repair(engine(), settings.current(), depths=_never) == 0


def _never(_queues: Iterable[str]) -> dict[str, int]:
    raise AssertionError("the broker was asked without a reason")


def _narrow(batch: int) -> Any:
    return {name: replace(handler, batch=batch) for name, handler in handlers().items()}
