"""The reasons why a task is not running. Most tests give the broker's answer; one asks a real broker and worker."""

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
from tasks.core.registered_types import LIVE_SECONDS
from tasks.core.registry import handlers
from tasks.execution import claim
from tasks.execution.deliver import deliver
from tasks.operations import why_waiting
from tasks.operations.task_details import read_details
from tasks.operations.why_waiting import QueueState, ReasonCode, reasons
from tasks.submission.envelope import NewTask, TaskEnvelope
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until
from tests.tasks.command_line import DIES, FLAKY, dead, submitted
from tests.tasks.registrations import handler_of, no_worker_processes, registered

CONSUMED = QueueState(waiting=0, consumers=frozenset({"worker@here"}))
MINUTE = timedelta(minutes=1)


def asked(task: uuid.UUID, queue: QueueState | Unreachable = CONSUMED) -> dict[ReasonCode, str]:
    def read_queue(_queue: str) -> QueueState:
        if isinstance(queue, Unreachable):
            raise queue
        return queue

    with engine().connect() as connection:
        found = read_details(connection, task)
    given = reasons(found, settings.current(), known_types=handlers(), read_queue=read_queue)
    return {each.code: each.message for each in given}


def empty_outbox() -> None:
    """Delete all wake-ups, as if they had been published."""
    with engine().begin() as connection:
        connection.execute(sql("DELETE FROM ledger.outbox_event"))


def test_a_final_task_has_one_reason_and_the_broker_is_not_asked(stack: ServersOfTests) -> None:
    (task,) = dead()
    assert list(asked(task, Unreachable())) == [ReasonCode.FINAL]
    assert "It has been DEAD since" in asked(task)[ReasonCode.FINAL]


def test_a_running_task_names_its_holder_and_an_expired_lease_is_reported_as_lost(stack: ServersOfTests) -> None:
    (task,) = submitted({})
    with engine().begin() as connection:
        claim.claim(connection, [task], handlers=handlers(), holder="a worker", lease_seconds=60)
    assert "held by a worker" in asked(task)[ReasonCode.RUNNING]
    move(stack, 61)
    assert "expired at" in asked(task)[ReasonCode.WORKER_LOST]


def test_a_task_that_is_not_due_has_its_other_reasons_too(stack: ServersOfTests) -> None:
    (task,) = submitted({}, run_at=10 * MINUTE)
    with engine().begin() as connection:
        pause = sql("INSERT INTO ledger.queue_pause (queue, actor, reason) VALUES ('ingest', 'me@here', 'a move')")
        connection.execute(pause)
    found = asked(task, QueueState(0, frozenset()))
    assert list(found) == [ReasonCode.NOT_DUE, ReasonCode.QUEUE_PAUSED, ReasonCode.NO_WORKER]
    assert "me@here: a move" in found[ReasonCode.QUEUE_PAUSED]
    move(stack, 601)
    assert ReasonCode.NOT_DUE not in asked(task)


def test_an_unknown_type_and_an_unknown_queue_are_named(stack: ServersOfTests) -> None:
    with engine().begin() as connection:
        task = connection.execute(sql("SELECT ledger.ingest_submit('unknown.type', '{}')")).scalar_one()
        connection.execute(sql("UPDATE ledger.ingest_task SET queue = 'nowhere'"))  # INGEST_QUEUES has lost it
    found = asked(task)
    assert "'unknown.type'" in found[ReasonCode.UNKNOWN_HANDLER]
    assert "'nowhere'" in found[ReasonCode.UNKNOWN_QUEUE]


def test_an_unreachable_broker_is_a_reason_and_not_an_error(stack: ServersOfTests) -> None:
    (task,) = submitted({})
    assert asked(task, Unreachable("The broker does not answer: no."))[ReasonCode.BROKER_UNREACHABLE] == (
        "The broker does not answer: no. The task will be woken when the broker is back."
    )


def test_a_wakeup_is_found_in_the_outbox_then_in_the_broker_then_reported_as_lost(stack: ServersOfTests) -> None:
    with engine().begin() as connection:
        task = connection.execute(sql(f"SELECT ledger.ingest_submit('{FLAKY}', '{{}}')")).scalar_one()
    assert "has been waiting in the outbox" in asked(task)[ReasonCode.WAKEUP_IN_OUTBOX]
    with engine().begin() as connection:
        connection.execute(
            sql("UPDATE ledger.outbox_event SET attempt_count = 2, last_error = E'no route\\nat line 1'")
        )
    assert "2 failed: no route)" in asked(task)[ReasonCode.WAKEUP_IN_OUTBOX]
    empty_outbox()
    assert "behind at most 7 messages" in asked(task, QueueState(7, frozenset("w")))[ReasonCode.WAKEUP_IN_BROKER]
    assert "woken again at" in asked(task)[ReasonCode.WAKEUP_LOST]
    move(stack, settings.current().ingest_wakeup_grace_ms / 1000 + 1)
    assert "by the next reclaim" in asked(task)[ReasonCode.WAKEUP_LOST]


def test_the_wakeup_of_another_task_is_not_shown(stack: ServersOfTests) -> None:
    (task,) = submitted({})
    empty_outbox()
    submitted({})
    assert list(asked(task)) == [ReasonCode.WAKEUP_LOST]


def test_a_retrying_task_has_its_wakeup_for_the_time_of_the_retry(stack: ServersOfTests) -> None:
    (task,) = submitted({"fail": 1})
    deliver(engine(), [task])
    with engine().connect() as connection:
        found = read_details(connection, task)
    assert [wakeup.next_retry_at for wakeup in found.wakeups if wakeup.locked_by is None] == [found.task.next_retry_at]
    assert list(asked(task)) == [ReasonCode.NOT_DUE]


def test_only_later_wakeups_for_the_tasks_own_time_are_read(stack: ServersOfTests) -> None:
    (task,) = submitted({}, run_at=10 * MINUTE)
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.outbox_event SET next_retry_at = next_retry_at + interval '1 s'"))
        assert read_details(connection, task).wakeups == []


def test_the_workers_that_consume_a_queue_are_found(celery_setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app: Celery = celery_setup.app
    monkeypatch.setattr(broker, "app", app)
    wait_until(lambda: len(why_waiting.read_queue("ingest").consumers or ()) == 1, "the worker answers")
    assert why_waiting.read_queue("nowhere") == QueueState(0, frozenset())


def test_the_envelope_of_a_stored_task_can_be_submitted_again(stack: ServersOfTests) -> None:
    (task,) = submitted(DIES, key="invoice 17", context={"traceId": "t1"}, max_attempts=3)
    with engine().connect() as connection:
        envelope = read_details(connection, task).task.envelope()
    assert envelope["retry"] == {"count": 0, "max": 3, "nextAttemptAt": None}
    assert "leaseToken" not in envelope
    again = TaskEnvelope.model_validate(envelope).new_task()
    kept: dict[str, Any] = {"queue": "ingest", "priority": 5, "max_attempts": 3}
    assert again == NewTask(FLAKY, DIES, key="invoice 17", context={"traceId": "t1"}, **kept)


def test_a_type_that_no_live_worker_knows_is_a_reason_although_this_process_has_its_handler(
    stack: ServersOfTests,
) -> None:
    with no_worker_processes():
        (task,) = submitted({})
        assert ReasonCode.UNKNOWN_HANDLER not in asked(task)  # no worker is registered: `no_worker` is the reason
        registered(handler_of("another.type"), name="one:1")
        assert asked(task)[ReasonCode.UNKNOWN_HANDLER].startswith(f"No live worker knows the type '{FLAKY}'.")
        registered(handler_of(FLAKY), name="two:1", ingest_queues=("ingest", "slow"), consumed=("slow",))
        found = asked(task)[ReasonCode.UNKNOWN_HANDLER]
        assert found == f"No live worker that consumes the queue 'ingest' knows the type '{FLAKY}'; two:1 knows it."
        registered(handler_of(FLAKY), name="three:1")
        assert ReasonCode.UNKNOWN_HANDLER not in asked(task)
        move(stack, LIVE_SECONDS + 1)
        registered(handler_of("another.type"), name="one:1")
        assert ReasonCode.UNKNOWN_HANDLER in asked(task)
