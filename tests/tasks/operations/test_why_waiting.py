"""Why a task is not running. The ledger is real; what the broker may answer is given, and asked for real at the end."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

import settings
from models.engine import engine
from models.errors import Unreachable
from models.sql import sql
from tasks import broker
from tasks.core.registry import handlers
from tasks.execution import claim
from tasks.execution.deliver import ingest
from tasks.operations import why_waiting
from tasks.operations.task_details import details
from tasks.operations.why_waiting import Seen, Why, reasons
from tasks.submission.envelope import NewTask, TaskEnvelope
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until
from tests.tasks.door import DIES, FLAKY, dead, submitted

WORKED_ON = Seen(waiting=0, consumers=frozenset({"worker@here"}))
MINUTE = timedelta(minutes=1)


def asked(task: uuid.UUID, seen: Seen | Unreachable = WORKED_ON) -> dict[Why, str]:
    def look(_queue: str) -> Seen:
        if isinstance(seen, Unreachable):
            raise seen
        return seen

    with engine().connect() as connection:
        found = details(connection, task)
    return {each.code: each.message for each in reasons(found, settings.current(), known_types=handlers(), look=look)}


def sent() -> None:
    """Every wake-up has left the outbox."""
    with engine().begin() as connection:
        connection.execute(sql("DELETE FROM ledger.outbox_event"))


def test_a_final_task_is_final_and_the_broker_is_not_asked(stack: ServersOfTests) -> None:
    (task,) = dead()
    assert list(asked(task, Unreachable())) == [Why.FINAL]
    assert "DEAD, since" in asked(task)[Why.FINAL]


def test_a_running_task_says_who_holds_it_and_a_lease_that_ran_out_that_it_is_lost(stack: ServersOfTests) -> None:
    (task,) = submitted({})
    with engine().connect() as connection:
        claim.claim(connection, [task], handlers=handlers(), holder="a worker", lease_seconds=60)
    assert "held by a worker" in asked(task)[Why.RUNNING]
    move(stack, 61)
    assert "ran out" in asked(task)[Why.WORKER_LOST]


def test_what_holds_up_a_task_that_is_not_due_is_said_before_its_time_comes(stack: ServersOfTests) -> None:
    (task,) = submitted({}, run_at=10 * MINUTE)
    with engine().begin() as connection:
        pause = sql("INSERT INTO ledger.queue_pause (queue, actor, reason) VALUES ('ingest', 'me@here', 'a move')")
        connection.execute(pause)
    found = asked(task, Seen(0, frozenset()))
    assert list(found) == [Why.NOT_DUE, Why.QUEUE_PAUSED, Why.NO_WORKER]
    assert "me@here: a move" in found[Why.QUEUE_PAUSED]
    move(stack, 601)
    assert Why.NOT_DUE not in asked(task)


def test_a_type_and_a_queue_that_nobody_knows_are_named(stack: ServersOfTests) -> None:
    with engine().begin() as connection:
        submit = sql("SELECT ledger.ingest_submit('nobody.knows', '{}', NULL, 'nowhere')")
        task = connection.execute(submit).scalar_one()
    found = asked(task)
    assert "'nobody.knows'" in found[Why.UNKNOWN_HANDLER]
    assert "'nowhere'" in found[Why.UNKNOWN_QUEUE]


def test_a_broker_that_is_away_is_a_reason_and_no_failure(stack: ServersOfTests) -> None:
    (task,) = submitted({})
    assert asked(task, Unreachable("The broker does not answer: no."))[Why.BROKER_UNREACHABLE] == (
        "The broker does not answer: no. It is woken when the broker is back."
    )


def test_a_wakeup_is_followed_from_the_outbox_to_the_broker_until_it_is_lost(stack: ServersOfTests) -> None:
    with engine().begin() as connection:
        task = connection.execute(sql(f"SELECT ledger.ingest_submit('{FLAKY}', '{{}}')")).scalar_one()
    assert "waits in the outbox" in asked(task)[Why.WAKEUP_IN_OUTBOX]
    with engine().begin() as connection:
        connection.execute(
            sql("UPDATE ledger.outbox_event SET attempt_count = 2, last_error = E'no route\\nat line 1'")
        )
    assert "2 failed: no route)" in asked(task)[Why.WAKEUP_IN_OUTBOX]
    sent()
    assert "behind at most 7 messages" in asked(task, Seen(7, frozenset("w")))[Why.WAKEUP_IN_BROKER]
    assert "woken again at" in asked(task)[Why.WAKEUP_LOST]
    move(stack, settings.current().ingest_wakeup_grace_ms / 1000 + 1)
    assert "by the next reclaim" in asked(task)[Why.WAKEUP_LOST]


def test_the_wakeup_of_a_neighbour_is_not_taken_for_its_own(stack: ServersOfTests) -> None:
    (task,) = submitted({})
    sent()
    submitted({})
    assert list(asked(task)) == [Why.WAKEUP_LOST]


def test_a_retry_is_seen_with_the_wakeup_for_its_time(stack: ServersOfTests) -> None:
    (task,) = submitted({"fail": 1})
    ingest(engine(), [task])
    with engine().connect() as connection:
        found = details(connection, task)
    assert [wakeup.next_retry_at for wakeup in found.wakeups if wakeup.locked_by is None] == [found.task.next_retry_at]
    assert list(asked(task)) == [Why.NOT_DUE]


def test_of_a_million_wakeups_for_later_only_those_for_its_own_time_are_looked_through(stack: ServersOfTests) -> None:
    (task,) = submitted({}, run_at=10 * MINUTE)
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.outbox_event SET next_retry_at = next_retry_at + interval '1 s'"))
        assert details(connection, task).wakeups == []


def test_the_workers_of_a_queue_are_seen(celery_setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app: Celery = celery_setup.app
    monkeypatch.setattr(broker, "app", app)
    wait_until(lambda: len(why_waiting.look("ingest").consumers or ()) == 1, "the worker answers within its second")
    assert why_waiting.look("nowhere") == Seen(0, frozenset())


def test_a_task_as_it_is_shown_can_be_submitted_again(stack: ServersOfTests) -> None:
    (task,) = submitted(DIES, key="invoice 17", context={"traceId": "t1"}, max_attempts=3)
    with engine().connect() as connection:
        envelope = details(connection, task).task.envelope()
    assert envelope["retry"] == {"count": 0, "max": 3, "nextAttemptAt": None}
    assert "leaseToken" not in envelope
    again = TaskEnvelope.model_validate(envelope).new_task()
    assert again == NewTask(FLAKY, DIES, key="invoice 17", context={"traceId": "t1"}, max_attempts=3)
