"""A broker may lose any message: the ledger wake-ups again, and never for a million tasks that merely wait (P8)."""

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
from outbox.after_commit_publisher import submitter
from outbox.relay import Relay
from tasks import NewTask, broker, submit_many
from tasks.core.registry import handlers
from tasks.execution.claim import claim
from tasks.execution.deliver import ingest
from tasks.recovery.lost_wakeups import wake_again
from tests.outbox.ledger import arrived, move
from tests.servers import ServersOfTests
from tests.tasks.work import effects, register, rows, sink, wakeups

GRACE = 10  # seconds, the default


@pytest.fixture(autouse=True)
def ledger(stack: ServersOfTests) -> ServersOfTests:
    register()
    sink()
    return stack


def submitted(count: int, **how: Any) -> list[uuid.UUID]:
    with sessions()() as session:
        ids = [each.task_id for each in submit_many(session, [NewTask("test.insert", **how) for _ in range(count)])]
        session.commit()
    assert submitter().flush(10)
    return ids


def flush_broker(stack: ServersOfTests) -> None:
    with redis.Redis.from_url(stack.addresses["BROKER_URL"]) as client:
        client.flushall()


def look(depth: int | None = None) -> int:
    """With a given depth of every queue, or with what the broker says."""

    def given(queues: Iterable[str]) -> dict[str, int]:
        return dict.fromkeys(queues, depth or 0)

    return wake_again(engine(), settings.current(), depths=broker.depths if depth is None else given)


def test_everything_that_the_broker_forgot_is_woken_again(ledger: ServersOfTests) -> None:
    ids = submitted(250)
    flush_broker(ledger)
    assert look() == 0  # not yet
    move(ledger, GRACE + 1)
    assert look() == 250
    assert submitter().flush(10)
    assert arrived(ledger) == {str(one): 1 for one in ids}
    assert [len(wakeup.ids) for wakeup in wakeups()[-3:]] == [100, 100, 50]


def test_tasks_that_wait_in_a_living_queue_are_not_woken_again(ledger: ServersOfTests) -> None:
    submitted(50)
    move(ledger, 100 * GRACE)
    assert look() == 0


def test_the_grace_doubles_with_each_wakeup(ledger: ServersOfTests) -> None:
    submitted(1)
    waited = 0.0
    for _ in range(4):
        grace = GRACE + waited  # since it was first woken
        move(ledger, grace - 1)
        flush_broker(ledger)
        assert look() == 0
        move(ledger, 2)
        assert look() == 1
        assert submitter().flush(10)
        waited += grace + 1
    assert waited > 15 * GRACE


def test_a_wakeup_that_still_waits_in_the_outbox_is_not_lost(ledger: ServersOfTests) -> None:
    """A broker that was away for 20 minutes costs nobody a second wake-up."""
    submitted(3)
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.outbox_event SET status = 'NEW', sent_at = NULL"))
    flush_broker(ledger)
    move(ledger, 1200)
    assert look() == 0
    relay = Relay.of(settings.current())
    assert relay.tick().sent == 1
    relay.close()
    assert look() == 0


def test_a_dead_wakeup_does_not_strand_its_task(ledger: ServersOfTests) -> None:
    submitted(1)
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.outbox_event SET status = 'DEAD', sent_at = NULL"))
    flush_broker(ledger)
    move(ledger, GRACE + 1)
    assert look() == 1


def test_a_task_that_was_overtaken_in_a_full_queue_is_woken_again(ledger: ServersOfTests) -> None:
    """Redis loses a message that it has handed to a worker that dies: the queue lives on, and one task is forgotten."""
    (lost,) = submitted(1)
    move(ledger, 1)
    later = submitted(5)
    move(ledger, 1)
    waiting = submitted(1)
    with engine().connect() as connection:  # own ids first, and no place for others
        held = claim(connection, later, handlers=_narrow(5), holder="worker", lease_seconds=600)
    assert {task.id for task in held.tasks} == set(later)
    assert look(depth=1) == 0  # seen just now
    move(ledger, GRACE + 1)
    assert look(depth=1) == 1  # that is a grace ago now
    assert wakeups()[-1].ids == [lost]
    assert waiting[0] not in wakeups()[-1].ids


def test_scheduled_tasks_are_nobodys_loss(ledger: ServersOfTests) -> None:
    submitted(1, run_at=timedelta(hours=1))
    flush_broker(ledger)
    move(ledger, 3000)
    assert look() == 0
    move(ledger, 601)
    relay = Relay.of(settings.current())
    assert relay.tick().sent == 1
    relay.close()
    assert look() == 0
    flush_broker(ledger)
    move(ledger, GRACE + 1)
    assert look() == 1


def test_a_type_that_nobody_knows_waits_and_burns_nothing(ledger: ServersOfTests) -> None:
    with engine().begin() as connection:
        id_ = connection.execute(sql("SELECT ledger.ingest_submit('not.yet.deployed', '{}')")).scalar_one()
    ingest(engine(), [id_])
    assert rows() == [("QUEUED", 0)]
    assert wakeups()[-1].due_at is not None
    assert effects() == {}


def test_the_broker_is_asked_only_when_there_is_a_suspicion(ledger: ServersOfTests) -> None:
    submitted(3)
    assert wake_again(engine(), settings.current(), depths=_never) == 0


def _never(_queues: Iterable[str]) -> dict[str, int]:
    raise AssertionError("there was no reason to ask")


def _narrow(batch: int) -> Any:
    return {name: replace(handler, batch=batch) for name, handler in handlers().items()}
