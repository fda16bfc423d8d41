"""The stack for users' tests: tasks go through the real broker, and the test process runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.orm import Session

from embedded import stack_for_tests
from embedded.stack_for_tests import StackForTests
from embedded.temporary_servers import TemporaryServers
from models.errors import Misuse
from models.sql import sql
from sinks.configuration import open_sinks
from tasks import Task, submit
from tests.servers import ServersOfTests
from tests.tasks.deliveries import handled
from tests.tasks.work import rows

STATUSES = "type, status, attempt_count"


@pytest.fixture
def tests_stack(stack: ServersOfTests) -> Iterator[StackForTests]:
    """Use the servers of our own tests instead of starting new ones."""
    superuser = stack.cluster.superuser.url.render_as_string(hide_password=False)
    assert make_url(superuser).database == "migrated"
    made = StackForTests(TemporaryServers(stack.home, stack.addresses, superuser))
    with handled("test.chain", chain, backoff=[60]):
        yield made
    made.superuser.dispose()


def chain(task: Task, db: Session) -> None:
    """Submit the next task; the last one fails once."""
    if task.payload:
        submit(db, "test.chain", task.payload - 1)
    elif task.attempt_count == 0:
        raise LookupError("not yet")


def submitted(stack: StackForTests, payload: int) -> None:
    with Session(stack.engine) as session:
        submit(session, "test.chain", payload)
        session.commit()


def test_run_all_runs_every_due_task_and_those_that_it_submits(tests_stack: StackForTests) -> None:
    submitted(tests_stack, 2)
    assert tests_stack.run_all() == 3
    assert rows(STATUSES) == [("test.chain", "SUCCEEDED", 0)] * 2 + [("test.chain", "RETRYING", 1)]
    assert tests_stack.run_all() == 0, "a task that is due later must not run"

    tests_stack.travel(minutes=1)
    assert tests_stack.run_all() == 1
    assert rows(STATUSES)[-1] == ("test.chain", "SUCCEEDED", 1)


def test_a_test_finds_no_data_of_the_test_before(tests_stack: StackForTests) -> None:
    submitted(tests_stack, 1)
    tests_stack.travel(days=1)
    tests_stack.empty()
    assert rows() == []
    assert tests_stack.run_all() == 0
    with tests_stack.engine.begin() as connection:
        assert connection.execute(sql("SELECT count(*) FROM ledger.ledger_clock")).scalar() == 0


def test_tasks_that_submit_each_other_without_end_do_not_hang_the_test(
    tests_stack: StackForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_for_tests, "MOST_MESSAGES", 5)
    submitted(tests_stack, 20)
    with pytest.raises(Misuse, match="More than 5 messages"):
        tests_stack.run_all()


def test_a_handler_writes_to_a_sink_in_another_database_that_no_other_test_has_used(
    tests_stack: StackForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINKS", "{}")  # `celeriac_stack` also restores it at the end of a test
    billing, another = tests_stack.database("billing"), tests_stack.database("billing")
    assert billing.url.database != another.url.database
    with billing.begin() as connection:
        connection.execute(text("CREATE TABLE payment (task_id uuid)"))

    def pay(task: Task) -> None:
        insert = text("INSERT INTO payment VALUES (:id)")
        task.sink("billing").run(lambda db: db.execute(insert, {"id": task.id}) and None)

    tests_stack.use_sinks(billing={"url": billing.url, "guarantee": "keyed"})
    with handled("test.pay", pay, transactional=False):
        with Session(tests_stack.engine) as session:
            id_ = submit(session, "test.pay").task_id
            session.commit()
        assert tests_stack.run_all() == 1
    with billing.begin() as connection:
        assert connection.scalars(text("SELECT task_id FROM payment")).all() == [id_]
    open_sinks().close()
