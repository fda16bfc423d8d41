"""One worker does not keep many slow tasks: batches become small, and the rest of a message is woken for others."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

import settings
from models.engine import engine
from outbox.after_commit_publisher import after_commit_publisher
from tasks import Task, broker
from tasks.core import batch_size
from tasks.core import wakeups as core_wakeups
from tasks.core.registry import Handler, find, handlers
from tasks.execution.claim import claim
from tasks.execution.deliver import deliver
from tasks.recovery.lost_wakeups import repair
from tests.outbox.ledger import arrived, move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import BatchClock, claimed, handled, leases, raising, submitted
from tests.tasks.work import OnPurpose, insert, rows, transitions, wakeups

TYPE = "test.slow"
NO_TIME = "there was no time to start it"


pytestmark = pytest.mark.usefixtures("ledger", "clock")


def quickly(each: Task, db: Session) -> None:
    insert(each, db)


def released(ids: Sequence[uuid.UUID]) -> list[uuid.UUID]:
    return [id_ for id_ in ids if (NO_TIME,) in transitions(id_, "message")]


def handler_that_takes(seconds: float, **how: Any) -> Handler:
    with handled(TYPE, how.pop("function", quickly), **how) as handler:
        batch_size.record_duration(handler, seconds)
        return handler


@pytest.mark.parametrize(
    ("seconds", "batch"), [(0.0, 1000), (0.0005, 1000), (0.01, 50), (0.1, 5), (0.4, 1), (3600.0, 1)]
)
def test_a_batch_takes_about_half_a_second_and_has_at_least_one_task(seconds: float, batch: int) -> None:
    assert batch_size.batch_of(handler_that_takes(seconds)) == batch


def test_a_batch_handler_always_gets_its_full_batch() -> None:
    handler = handler_that_takes(60.0, function=lambda _tasks, _db: None, many=True, batch=1000)
    assert batch_size.batch_of(handler) == 1000


def test_one_slow_task_does_not_keep_batches_small_for_ever() -> None:
    handler = handler_that_takes(10.0)
    assert batch_size.batch_of(handler) == 1
    for _ in range(150):
        batch_size.record_duration(handler, 0.0001)
    assert batch_size.batch_of(handler) == handler.batch


def test_a_batch_that_turns_out_to_be_slow_keeps_its_results_and_releases_the_rest_in_small_wakeups(
    clock: BatchClock,
) -> None:
    def slowly(each: Task, db: Session) -> None:
        insert(each, db)
        clock.passes(0.7)

    with handled(TYPE, slowly) as handler:
        batch_size.record_duration(handler, 0.0)  # it was quick until now
        ids = submitted(20, TYPE)
        before = len(wakeups())
        deliver(engine(), ids)
        done = [id_ for (id_,) in rows("id", "status = 'SUCCEEDED'")]
        assert done == ids[:2], "the second task started within the time"
        assert set(released(ids)) == set(ids) - set(done)
        assert set(rows("status, attempt_count")) == {("SUCCEEDED", 0), ("QUEUED", 0)}
        again = wakeups()[before:]
        assert {len(wakeup.ids) for wakeup in again} == {3}
        assert sorted(id_ for wakeup in again for id_ in wakeup.ids) == sorted(released(ids))
    assert leases() == 0


def test_tasks_of_a_message_beyond_a_small_batch_are_woken_for_others_at_once(ledger: ServersOfTests) -> None:
    seen: list[int] = []

    def look(each: Task, db: Session) -> None:
        after_commit_publisher().wait_until_idle(10)
        seen.append(len(arrived(ledger)))
        insert(each, db)

    with handled(TYPE, look) as handler:
        ids = submitted(10, TYPE)
        assert after_commit_publisher().wait_until_idle(10)
        ledger.flush_redis()
        batch_size.record_duration(handler, 0.2)
        deliver(engine(), ids)
    done = [id_ for (id_,) in rows("id", "status = 'SUCCEEDED'")]
    assert len(done) == 2
    assert seen[0] == 8, "the rest is woken before the first task of the batch has run"
    assert arrived(ledger) == {str(id_): 1 for id_ in ids if id_ not in done}
    assert {len(transitions(id_)) for id_ in ids if id_ not in done} == {1}, "they were not claimed"
    assert [len(wakeup.ids) for wakeup in wakeups()[-4:]] == [2, 2, 2, 2]


def test_a_claim_of_a_slow_type_stays_small() -> None:
    with handled(TYPE, quickly) as handler:
        ids = submitted(10, TYPE)
        batch_size.record_duration(handler, 0.2)
        found = claimed(ids[:1])
        assert len(found.tasks) == 2
        assert found.left == []


def test_the_first_task_of_a_type_runs_alone() -> None:
    with handled(TYPE, quickly) as handler, engine().begin() as connection:
        ids = submitted(10, TYPE)
        how: dict[str, Any] = {"handlers": handlers(), "holder": "another:1", "lease_seconds": 60}
        first = claim(connection, ids[:2], **how)
        assert ([each.id for each in first.tasks], first.left) == (ids[:1], ids[1:2])
        batch_size.record_duration(handler, 0.0)
        assert len(claim(connection, first.left, **how).tasks) == 9


def test_tasks_that_run_alone_after_a_broken_batch_get_new_time(clock: BatchClock) -> None:
    """Otherwise a batch whose last task fails late would settle only that one, again and again."""

    def last_fails(each: Task, db: Session) -> None:
        quickly(each, db)
        if each.payload == "last":
            clock.passes(batch_size.STOP_SECONDS)
            raising(OnPurpose())(each, db)

    with handled(TYPE, last_fails) as handler:
        batch_size.record_duration(handler, 0.0)
        ids = submitted(3, TYPE, lambda n: "last" if n == 2 else n)
        deliver(engine(), ids)
    assert sorted(rows()) == [("RETRYING", 1), ("SUCCEEDED", 0), ("SUCCEEDED", 0)]
    assert released(ids) == []


@pytest.mark.parametrize("transactional", [True, False])
def test_a_type_whose_first_task_is_slow_is_shared_from_the_third_task_on(
    transactional: bool, clock: BatchClock
) -> None:
    function = (lambda _task, _db: clock.passes(0.6)) if transactional else (lambda _task: clock.passes(0.6))
    with handled(TYPE, function, transactional=transactional):
        ids = submitted(10, TYPE)
        deliver(engine(), ids)
        assert batch_size.batch_of(find(TYPE)) == 1
    assert rows("id", "status = 'SUCCEEDED'") == [(ids[0],), (ids[1],)]
    assert sorted(id_ for wakeup in wakeups()[1:] for id_ in wakeup.ids) == ids[2:]
    assert {len(transitions(id_)) for id_ in ids[2:]} == {1}, "they were not claimed"


def test_a_lost_wakeup_of_a_task_left_to_others_is_noticed_after_one_grace(
    ledger: ServersOfTests,
) -> None:
    """The grace doubles with each lost wake-up, and this is the first, however long the task had waited."""
    with handled(TYPE, quickly) as handler:
        ids = submitted(3, TYPE)
        assert after_commit_publisher().wait_until_idle(10)
        move(ledger, 3600)
        batch_size.record_duration(handler, 1.0)
        deliver(engine(), ids)
        assert after_commit_publisher().wait_until_idle(10)
        ledger.flush_redis()
        move(ledger, settings.current().ingest_wakeup_grace_ms / 1000 + 1)
        assert repair(engine(), settings.current(), depths=broker.depths) == 2


def test_tasks_that_cannot_be_woken_for_others_run_here_and_are_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a task that was claimed alone and never started would be charged as `worker_lost`."""
    monkeypatch.setattr(core_wakeups, "WAKE_AGAIN", text("SELECT 1 / 0"))
    with handled(TYPE, quickly) as handler:
        ids = submitted(3, TYPE)
        batch_size.record_duration(handler, 1.0)
        deliver(engine(), ids)
    assert rows() == [("SUCCEEDED", 0)] * 3
