"""The stack that a user's tests get: everything goes through the real broker, and this process works it off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import make_url
from sqlalchemy.orm import Session

from embedded import test_stack
from embedded.temporary_servers import Scratch
from embedded.test_stack import StackOfTests
from models.errors import Misuse
from models.sql import sql
from tasks import Task, submit
from tests.servers import ServersOfTests
from tests.tasks.deliveries import handled
from tests.tasks.work import rows

STATUSES = "type, status, attempt_count"


@pytest.fixture
def of_tests(stack: ServersOfTests) -> Iterator[StackOfTests]:
    """On the servers of our own tests, which `scratch` would start anew."""
    superuser = stack.cluster.superuser.url.render_as_string(hide_password=False)
    assert make_url(superuser).database == "migrated"
    made = StackOfTests(Scratch(stack.home, stack.addresses, superuser))
    with handled("test.chain", chain, backoff=[60]):
        yield made
    made.superuser.dispose()


def chain(task: Task, db: Session) -> None:
    """Submits the next one; the last one fails once."""
    if task.payload:
        submit(db, "test.chain", task.payload - 1)
    elif task.attempt_count == 0:
        raise LookupError("not yet")


def submitted(stack: StackOfTests, payload: int) -> None:
    with Session(stack.engine) as session:
        submit(session, "test.chain", payload)
        session.commit()


def test_everything_that_is_due_is_worked_off_and_what_follows_from_it(of_tests: StackOfTests) -> None:
    submitted(of_tests, 2)
    assert of_tests.run_all() == 3
    assert rows(STATUSES) == [("test.chain", "SUCCEEDED", 0)] * 2 + [("test.chain", "RETRYING", 1)]
    assert of_tests.run_all() == 0, "what is due later stays"

    of_tests.travel(minutes=1)
    assert of_tests.run_all() == 1
    assert rows(STATUSES)[-1] == ("test.chain", "SUCCEEDED", 1)


def test_the_next_test_finds_nothing(of_tests: StackOfTests) -> None:
    submitted(of_tests, 1)
    of_tests.travel(days=1)
    of_tests.empty()
    assert rows() == []
    assert of_tests.run_all() == 0
    with of_tests.engine.begin() as connection:
        assert connection.execute(sql("SELECT count(*) FROM ledger.ledger_clock")).scalar() == 0


def test_tasks_that_submit_each_other_for_ever_end_with_a_sentence(
    of_tests: StackOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_stack, "MOST_MESSAGES", 5)
    submitted(of_tests, 20)
    with pytest.raises(Misuse, match="After 5 messages there are more"):
        of_tests.run_all()
