"""A discarded task has no effect, whatever it was doing."""

from __future__ import annotations

import uuid

import pytest
from sqlalchemy.orm import Session

from models.engine import engine
from tasks.core.task import Task
from tasks.execution.heartbeat import heartbeat
from tasks.operations import dead_tasks
from tasks.operations.discard import AlreadyDone, discard
from tasks.operations.listing import UnknownTask
from tests.tasks.command_line import manage
from tests.tasks.deliveries import audits, delivered, handled, inserting, leases, scalar, scripted, submitted
from tests.tasks.work import effects, insert, task, transitions, wakeups

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def test_a_discarded_task_does_not_run_when_its_wakeup_arrives() -> None:
    (id_,) = submitted()
    assert discard(engine(), id_, actor="me", reason="old") == "QUEUED"
    delivered([id_])
    assert task(id_)["status"] == "DISCARDED"
    assert transitions(id_, "from_status, to_status, message, actor")[-1] == ("QUEUED", "DISCARDED", "old", "me")
    assert effects() == {}


@pytest.mark.guarantee
def test_a_task_discarded_while_it_runs_has_no_effect_and_the_rest_of_its_batch_succeeds() -> None:
    """The whole batch is rolled back, and the other tasks run again."""
    discarded: list[uuid.UUID] = []

    def discard_me(each: Task, _db: Session) -> None:
        if not discarded:
            discarded.append(each.id)
            assert discard(engine(), each.id, actor="me") == "RUNNING"

    ids = inserting({1: discard_me}, 3)
    delivered(ids)
    assert [task(id_)["status"] for id_ in ids] == ["SUCCEEDED", "DISCARDED", "SUCCEEDED"]
    assert effects() == {ids[0]: 1, ids[2]: 1}
    assert audits() == [(ids[1], "late_success")]
    assert leases() == 0


def test_a_batch_handler_is_not_interrupted_and_its_tasks_run_again_one_by_one() -> None:
    """The discarded one, too: that it is lost shows when it is settled, and rolls back what it wrote."""
    ran: list[list[int]] = []

    def work(tasks: list[Task], db: Session) -> None:
        ran.append([each.payload for each in tasks])
        for each in tasks:
            insert(each, db)
        if len(ran) == 1:
            discard(engine(), tasks[1].id, actor="me")
            heartbeat().watch()

    with handled("test.batch", work, many=True):
        ids = submitted(3, "test.batch", lambda n: n)
        delivered(ids)
    assert ran[0] == [0, 1, 2]
    assert [task(id_)["status"] for id_ in ids] == ["SUCCEEDED", "DISCARDED", "SUCCEEDED"]
    assert effects() == {ids[0]: 1, ids[2]: 1}
    assert ran[1:] == [[0], [1], [2]]
    assert leases() == 0


def test_discarding_a_final_or_unknown_task_is_refused() -> None:
    (id_,) = submitted()
    delivered([id_])
    with pytest.raises(AlreadyDone, match="is SUCCEEDED already"):
        discard(engine(), id_, actor="me")
    with pytest.raises(UnknownTask):
        discard(engine(), uuid.uuid4(), actor="me")


def test_discarding_a_task_wakes_the_next_one_of_its_partition_key() -> None:
    first, second = submitted(2, partition_key="a")
    last = max(wakeup.id for wakeup in wakeups())
    discard(engine(), first, actor="me")
    assert [wakeup.ids for wakeup in wakeups(f"id > {last}")] == [[second]]


def test_the_command_prints_the_previous_status_and_stores_the_reason() -> None:
    (id_,) = submitted()
    assert manage("discard", id_, "--reason", "by mistake").out == f"{id_} was QUEUED and is now DISCARDED.\n"
    assert "by mistake" in {message for (message,) in transitions(id_, "message")}
    again = manage("discard", id_)
    assert (again.code, "is DISCARDED already" in again.err) == (1, True)


def test_a_requeue_keeps_finished_steps_unless_they_are_reset() -> None:
    def fail(each: Task, db: Session) -> None:
        insert(each, db)
        raise RuntimeError

    (id_,) = scripted(fail, max_attempts=1)
    delivered([id_])
    with engine().begin() as connection:
        connection.exec_driver_sql(f"INSERT INTO celeriac.task_step (task_id, name, result) VALUES ('{id_}', 'a', '1')")
    count = "SELECT count(*) FROM ledger.task_step"
    list(dead_tasks.requeue(engine(), dead_tasks.Choice(ids=[id_]), actor="me"))
    assert scalar(count) == 1
    delivered([id_])
    list(dead_tasks.requeue(engine(), dead_tasks.Choice(ids=[id_]), actor="me", reset_steps=True))
    assert scalar(count) == 0
