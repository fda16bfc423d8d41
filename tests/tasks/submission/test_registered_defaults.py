"""Every lane of submitting has the same defaults: those of the handler, which workers register in the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg2
import pytest
from sqlalchemy.orm import Session

import settings
from models.engine import engine
from outbox.after_commit_publisher import after_commit_publisher
from tasks import NewTask, submit, submit_many
from tasks.core.registry import DEFAULT_BATCH, UnknownType, handlers
from tasks.submission.envelope import UnknownQueue
from tests.outbox.ledger import arrived
from tests.servers import ServersOfTests
from tests.tasks.deliveries import statements
from tests.tasks.registrations import handler_of, registered
from tests.tasks.work import rows, wakeups

pytestmark = pytest.mark.usefixtures("stack")
COLUMNS = "type, queue, priority, max_attempts"
REMOTE = {"queue": "slow", "priority": 8, "max_attempts": 3, "batch": 2}
QUEUES: dict[str, Any] = {"ingest_queues": ("ingest", "slow")}


@pytest.fixture
def client(database: str, stack: ServersOfTests) -> Iterator[Any]:
    """A cursor of plain psycopg2, as another program would use."""
    connection = psycopg2.connect(database.replace("+psycopg2", ""))
    yield connection.cursor()
    connection.close()


def from_sql(client: Any, arguments: str) -> None:
    client.execute(f"SELECT celeriac.ingest_submit({arguments})")
    client.connection.commit()


def test_a_workflow_submitted_from_sql_has_three_attempts_like_on_every_other_lane(
    client: Any, session: Session
) -> None:
    registered(handlers())
    from_sql(client, "'workflow.execute', '{}'")
    submit(session, "workflow.execute", {})
    session.commit()
    assert rows(COLUMNS) == [("workflow.execute", "ingest", 5, 3)] * 2
    assert [wakeup.batch for wakeup in wakeups()] == [1, 1]


def test_a_process_without_the_handler_and_sql_use_what_a_worker_has_registered(client: Any, session: Session) -> None:
    registered(handler_of("remote.task", **REMOTE), **QUEUES)
    from_sql(client, "'remote.task', '{}'")
    submit(session, "remote.task")
    submit(engine(), "remote.task")
    submit_many(session, [NewTask("remote.task"), NewTask("test.insert"), NewTask("remote.task")])
    session.commit()
    expected = [("remote.task", "slow", 8, 3)] * 5 + [("test.insert", "ingest", 5, 10)]
    assert sorted(rows(COLUMNS)) == expected
    assert {(wakeup.queue, wakeup.type, wakeup.batch) for wakeup in wakeups()} == {
        ("slow", "remote.task", 2),
        ("ingest", "test.insert", DEFAULT_BATCH),
    }


def test_given_arguments_win_over_what_is_registered(
    client: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(handler_of("remote.task", **REMOTE), **QUEUES)
    from_sql(client, "'remote.task', '{}', queue => 'ingest'")
    submit(session, "remote.task", queue="ingest", priority=0, max_attempts=7)
    session.commit()
    assert sorted(rows(COLUMNS)) == [("remote.task", "ingest", 0, 7), ("remote.task", "ingest", 8, 3)]


def test_the_handler_of_the_submitting_process_wins_over_the_one_of_a_worker(session: Session) -> None:
    registered(handler_of("test.insert", **REMOTE), **QUEUES)
    submit(session, "test.insert")
    session.commit()
    assert rows(COLUMNS) == [("test.insert", "ingest", 5, 10)]


def test_the_wakeup_of_a_type_that_only_the_ledger_knows_is_published_after_the_commit(stack: ServersOfTests) -> None:
    registered(handler_of("remote.task"))
    found = submit(engine(), "remote.task")
    assert after_commit_publisher().wait_until_idle(10)
    assert arrived(stack) == {str(found.task_id): 1}


def test_a_type_that_neither_this_process_nor_a_worker_knows_is_refused_and_the_transaction_goes_on(
    session: Session,
) -> None:
    registered(handler_of("remote.task"))
    for new in ([NewTask("remote.tusk")], [NewTask("remote.task"), NewTask("remote.tusk"), NewTask("test.insert")]):
        with pytest.raises(UnknownType, match=r"'remote\.tusk', neither here nor in a worker.*remote\.task"):
            submit_many(session, new)
    submit(session, "remote.task")
    session.commit()
    assert rows("type") == [("remote.task",)]
    assert len(wakeups()) == 1


def test_a_type_that_no_worker_knows_is_accepted_from_sql_with_the_workers_number_of_attempts(client: Any) -> None:
    from_sql(client, "'not.yet.deployed', '{}'")
    registered({}, ingest_max_attempts=4)
    from_sql(client, "'not.yet.deployed', '{}'")
    assert rows(COLUMNS) == [("not.yet.deployed", "ingest", 5, 10), ("not.yet.deployed", "ingest", 5, 4)]


def test_max_attempts_of_the_workers_settings_reaches_tasks_submitted_from_sql(client: Any) -> None:
    registered(handler_of("remote.task"), ingest_max_attempts=4)
    from_sql(client, "'remote.task', '{}'")
    assert rows("max_attempts") == [(4,)]


def test_the_worker_that_started_last_decides_what_a_type_declares(client: Any) -> None:
    old = registered(handler_of("remote.task", max_attempts=2), name="old:1")
    registered(handler_of("remote.task", max_attempts=6), name="new:1")
    old._due_at = 0.0
    old.tick()  # its sign of life does not restore what it declares
    from_sql(client, "'remote.task', '{}'")
    assert rows("max_attempts") == [(6,)]


def test_a_submit_that_needs_the_ledgers_defaults_is_still_one_statement(session: Session) -> None:
    registered(handler_of("remote.task"))
    session.connection()
    with statements() as sent:
        submit(session, "remote.task", key="one")
    with statements() as more:
        submit_many(session, [NewTask("remote.task", n) for n in range(1000)])
    assert (len(sent), len(more)) == (1, 1)
    session.rollback()


@pytest.mark.parametrize("queue", ["nowhere", "", "system"])
def test_an_unknown_queue_is_refused_from_sql_with_a_sentence_that_lists_the_known_ones(
    queue: str, client: Any
) -> None:
    for known in ("ingest", "ingest, slow"):
        with pytest.raises(psycopg2.Error) as refused:
            from_sql(client, f"'test.insert', '1', 'k', '{queue}'")
        assert refused.value.pgcode == "CL400"
        assert str(refused.value).partition("\n")[0] == f"There is no queue '{queue}'; the workers know {known}."
        client.connection.rollback()
        registered({}, **QUEUES)
    assert len(rows()) == len(wakeups()) == 0
    from_sql(client, "'test.insert', '1', 'k', 'slow'")
    assert rows("queue") == [("slow",)]


def test_a_handlers_queue_that_no_worker_lists_is_refused_on_every_lane(client: Any, session: Session) -> None:
    registered(handler_of("remote.task", queue="forgotten"))
    with pytest.raises(psycopg2.Error, match=r"There is no queue 'forgotten'; the workers know ingest\."):
        from_sql(client, "'remote.task', '{}'")
    with pytest.raises(UnknownQueue, match=r"There is no queue 'forgotten'; the workers know ingest\."):
        submit(session, "remote.task")
    with pytest.raises(UnknownQueue, match="INGEST_QUEUES lists ingest"):
        submit(session, "remote.task", queue="forgotten")
    session.commit()
    assert rows() == []
    assert settings.current().ingest_queues == ("ingest",)
