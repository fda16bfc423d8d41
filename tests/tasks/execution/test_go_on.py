"""A process whose batch was full goes on with other due tasks if the broker has no messages of its queue."""

from __future__ import annotations

import time
from typing import Any

import pytest
from celery import Celery

from models.engine import engine
from outbox.after_commit_publisher import after_commit_publisher
from tasks import broker
from tasks.core.task import Task
from tasks.execution import deliver as deliver_module
from tasks.execution.deliver import deliver
from tasks.execution.worker_end import WorkerEnd, use_worker_end
from tests.servers import ServersOfTests
from tests.tasks.deliveries import delivered, handled, statements, submitted
from tests.tasks.work import rows

TYPE = "test.go_on"
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def do(_task: Task, _db: Any) -> None:
    """A handler whose tasks are quick, so that its batches are full."""


def succeeded() -> int:
    return len(rows("id", "type = :type AND status = 'SUCCEEDED'", type=TYPE))


def published(count: int, **how: Any) -> list[Any]:
    ids = submitted(count, TYPE, **how)
    assert after_commit_publisher().wait_until_idle(20)
    return ids


def with_known_duration() -> None:
    """Run one task, so that the process knows how long its type takes."""
    delivered(submitted(1, TYPE))


def test_tasks_whose_messages_the_broker_has_lost_run_without_new_ones(ledger: ServersOfTests) -> None:
    with handled(TYPE, do, batch=2):
        with_known_duration()
        ids = published(7)
        ledger.flush_redis()
        deliver(engine(), ids[:2], is_empty=broker.is_empty)
        assert succeeded() == 8


def test_while_messages_wait_each_message_runs_its_own_tasks() -> None:
    with handled(TYPE, do, batch=2):
        with_known_duration()
        ids = published(7)
        assert broker.depths(["ingest"])["ingest"] > 0
        deliver(engine(), ids[:2], is_empty=broker.is_empty)
        assert succeeded() == 3


def test_the_broker_is_not_asked_after_a_batch_that_was_not_full(ledger: ServersOfTests) -> None:
    with handled(TYPE, do, batch=10):
        with_known_duration()
        ids = published(7)
        ledger.flush_redis()
        with statements() as sent:
            deliver(engine(), ids, is_empty=lambda _queue: pytest.fail("the broker was asked"))
        assert len(sent) == 3  # claim, guard, settle
        assert succeeded() == 8


def test_after_a_second_the_process_is_free_for_other_messages(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver_module, "GO_ON_SECONDS", 0.3)

    def take_time(_task: Task, _db: Any) -> None:
        time.sleep(0.1)  # the subject of this test

    with handled(TYPE, take_time, batch=2):
        with_known_duration()
        ids = published(40)
        ledger.flush_redis()
        deliver(engine(), ids[:2], is_empty=broker.is_empty)
        assert 5 <= succeeded() <= 11


def test_a_worker_that_is_about_to_end_goes_on_with_nothing(ledger: ServersOfTests) -> None:
    end = WorkerEnd()
    end.begin()
    use_worker_end(end)
    try:
        with handled(TYPE, do, batch=2):
            with_known_duration()
            ids = published(7)
            ledger.flush_redis()
            deliver(engine(), ids[:2], is_empty=broker.is_empty)
            assert succeeded() == 3
    finally:
        use_worker_end(None)


def test_an_unreachable_broker_has_no_messages_and_is_not_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery(broker="redis://127.0.0.1:1/0", set_as_current=False)
    monkeypatch.setattr(broker, "app", app)
    monkeypatch.setattr(broker._look, "made", None)
    asked: list[Any] = []
    connect = broker.Look._connect

    def note(look: broker.Look) -> Any:
        asked.append(look)
        return connect(look)

    monkeypatch.setattr(broker.Look, "_connect", note)
    assert broker.is_empty("ingest")
    assert broker.is_empty("ingest")
    assert len(asked) == 1
    broker._look().close()
    broker._look._reset()
