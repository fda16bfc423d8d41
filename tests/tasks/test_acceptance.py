"""The acceptance scenarios for tasks, with the statements and settings of the source documents (docs/seeds.md)."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import redis

import settings
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from outbox.relay import Relay
from tasks import broker, submit, ticks
from tasks.execution.deliver import deliver
from tasks.operations import dead_tasks
from tests.outbox.ledger import move, woken
from tests.servers import ServersOfTests
from tests.tasks.wakeup_repair import repair_lost_wakeups
from tests.tasks.work import SCRIPTS, OnPurpose, effects, insert, rows, transitions

# These two are spelled as in the source document.
TASK = sql("SELECT id,status,attempt_count,next_retry_at,last_error,updated_at FROM ledger.ingest_task WHERE id=:id")
HISTORY = sql("SELECT * FROM ledger.ingest_task_transition WHERE task_id=:id ORDER BY id")


pytestmark = pytest.mark.usefixtures("ledger")


def submitted(type: str, payload: Any = None, **how: Any) -> uuid.UUID:
    with sessions()() as session:
        task = submit(session, type, payload, **how)
        session.commit()
    return task.task_id


def delivered(stack: ServersOfTests) -> list[str]:
    """Publish all events, empty the broker's queue, and return the ids that a worker would get."""
    assert after_commit_publisher().wait_until_idle(20)
    relay = Relay.of(settings.current())
    relay.tick()
    relay.close()
    ids = [one for message in woken(stack) for one in message]
    with redis.Redis.from_url(stack.addresses["BROKER_URL"]) as client:
        for key in client.keys("celeriac:ingest*"):
            if b"dlq" not in key:
                client.delete(key)
    return ids


def one(statement: Any, id_: uuid.UUID) -> Any:
    with engine().begin() as connection:
        return connection.execute(statement, {"id": id_}).one()


def test_a_task_that_always_fails_is_retried_then_dead_with_a_dead_letter(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "INGEST_REDIS_MAX_ATTEMPTS": "2",
        "INGEST_REDIS_RETRY_BASE_BACKOFF_MS": "0",
        "INGEST_REDIS_RETRY_MAX_BACKOFF_MS": "0",
        "INGEST_REDIS_RECLAIM_IDLE_MS": "0",
    }.items():
        monkeypatch.setenv(name, value)
    settings.current.cache_clear()
    id_ = submitted("demo.flaky", {"fail": 10})

    deliver(engine(), delivered(ledger))
    first = one(TASK, id_)
    assert (first.status, first.attempt_count) == ("RETRYING", 1)
    assert "failure 1 of 10" in first.last_error
    assert first.next_retry_at is not None

    deliver(engine(), delivered(ledger))
    last = one(TASK, id_)
    assert (last.status, last.attempt_count, last.next_retry_at) == ("DEAD", 2, None)

    assert delivered(ledger) == []
    assert broker.depths(["ingest", "ingest.dlq"]) == {"ingest": 0, "ingest.dlq": 1}
    with engine().begin() as connection:
        assert connection.execute(sql("SELECT count(*) FROM ledger.task_lease")).scalar_one() == 0
        history = connection.execute(HISTORY, {"id": id_}).all()
    assert [(row.from_status, row.to_status, row.attempt_count) for row in history] == [
        (None, "QUEUED", 0),
        ("QUEUED", "RUNNING", 0),
        ("RUNNING", "RETRYING", 1),
        ("RETRYING", "RUNNING", 1),
        ("RUNNING", "DEAD", 2),
    ]
    assert [row.message for row in history[2::2]] == [
        f"RuntimeError: failure {n} of 10, as the payload asked for" for n in (1, 2)
    ]


def test_a_submitted_task_runs_once_and_leaves_no_message_and_no_lease(ledger: ServersOfTests) -> None:
    id_ = submitted("test.insert")
    deliver(engine(), delivered(ledger))
    assert rows() == [("SUCCEEDED", 0)]
    assert effects() == {id_: 1}
    assert broker.depths(["ingest"]) == {"ingest": 0}
    with engine().begin() as connection:
        assert connection.execute(sql("SELECT count(*) FROM ledger.task_lease")).scalar_one() == 0


def test_a_task_retries_while_its_dependency_is_down_and_succeeds_when_it_is_back(ledger: ServersOfTests) -> None:
    is_down = True

    def needs_it(task: Any, db: Any) -> None:
        if is_down:
            raise OnPurpose("the dependency is down")
        insert(task, db)

    SCRIPTS["needs it"] = needs_it
    id_ = submitted("test.scripted", {"do": "needs it"})
    for attempt in (1, 2, 3):
        deliver(engine(), delivered(ledger))
        assert rows() == [("RETRYING", attempt)]
        move(ledger, 600)
    is_down = False
    deliver(engine(), delivered(ledger))
    assert rows() == [("SUCCEEDED", 3)]
    assert effects() == {id_: 1}


@pytest.mark.parametrize("decision", ["requeue", "discard"])
def test_a_task_that_failed_three_times_is_dead_and_an_operator_may_requeue_or_discard_it(
    ledger: ServersOfTests, decision: str
) -> None:
    id_ = submitted("test.fail", max_attempts=3)
    for _ in range(3):
        deliver(engine(), delivered(ledger))
        move(ledger, 600)
    assert rows("status, attempt_count, error_message") == [("DEAD", 3, "OnPurpose: on purpose")]
    assert rows("payload") == [(None,)]
    operate = dead_tasks.requeue if decision == "requeue" else dead_tasks.discard
    list(operate(engine(), dead_tasks.Choice([id_]), actor="op@here", reason="looked at it"))
    status, message = transitions(id_, "to_status, message")[-1]
    assert (status, message) == ({"requeue": "QUEUED", "discard": "DISCARDED"}[decision], "looked at it")
    if decision == "requeue":
        assert rows() == [("QUEUED", 0)]
        deliver(engine(), delivered(ledger))
        assert rows() == [("RETRYING", 1)]
    assert effects() == {}


def test_no_task_is_lost_while_the_broker_is_unreachable_for_twenty_minutes(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as unreachable:
        unreachable.setenv("BROKER_URL", "redis://127.0.0.1:1/0")
        settings.current.cache_clear()
        for _ in range(20):
            submitted("test.insert")
        relay = Relay.of(settings.current())
        for _ in range(40):
            relay.circuits.answered("celery:ingest")  # otherwise an open circuit would skip the attempt
            relay.tick()
            move(ledger, 30)
        relay.close()
    settings.current.cache_clear()
    assert set(rows("status")) == {("QUEUED",)}
    move(ledger, 600)
    for _ in range(3):
        deliver(engine(), delivered(ledger))
        repair_lost_wakeups(depth=None)
        move(ledger, 600)
    assert set(rows()) == {("SUCCEEDED", 0)}
    assert set(effects().values()) == {1}


def test_a_tick_that_another_process_runs_is_not_run_until_its_lease_expires(ledger: ServersOfTests) -> None:
    with engine().begin() as connection:
        connection.execute(
            sql("""
                INSERT INTO ledger.tick (name, holder, lease_token, lease_until) VALUES
                ('reclaim', 'another', gen_random_uuid(), ledger.ledger_now() + interval '1 minute')""")
        )
    assert ticks.run("reclaim") is None
    move(ledger, 61)
    assert ticks.run("reclaim") is not None
