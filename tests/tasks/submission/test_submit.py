"""A task exists if and only if its transaction commits, and its wake-up is published right after the commit."""

from __future__ import annotations

import uuid
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

import outbox
import settings
from models.engine import engine
from models.errors import CeleriacError
from models.sql import sql
from models.status import TaskStatus
from outbox.after_commit_publisher import after_commit_publisher
from outbox.relay import Relay
from tasks import NewTask, Submitted, Task, submit, submit_many
from tasks.core.registry import DEFAULT_BATCH
from tasks.execution.deliver import deliver
from tasks.submission import submit as submit_module
from tests.outbox.ledger import arrived, move, woken
from tests.servers import ServersOfTests
from tests.tasks import work
from tests.tasks.deliveries import statements
from tests.tasks.work import rows, task, transitions, wakeups

pytestmark = pytest.mark.usefixtures("stack")


def wait_until_published() -> None:
    assert after_commit_publisher().wait_until_idle(10)


def arrived_ids(stack: ServersOfTests) -> set[uuid.UUID]:
    return {uuid.UUID(one) for one in arrived(stack)}


def nothing_is_stored() -> bool:
    with engine().connect() as connection:
        tables = ("ingest_task", "ingest_task_transition", "outbox_event")
        return not any(connection.execute(sql(f"SELECT count(*) FROM ledger.{table}")).scalar_one() for table in tables)


def test_a_rolled_back_submit_leaves_neither_task_nor_transition_nor_wakeup(session: Session) -> None:
    submit(session, "test.insert", {"n": 1}, key="k")
    session.rollback()
    assert nothing_is_stored()
    context = {"traceId": "abc", "user": {"name": "Ada"}}
    found = submit(session, "test.insert", {"n": 1}, key="k", priority=7, max_attempts=3, context=context)
    assert nothing_is_stored()  # visible to other transactions
    session.commit()
    row = task(found.task_id)
    assert found == Submitted(row["id"], TaskStatus.QUEUED, created=True)
    assert (row["type"], row["payload"], row["context"]) == ("test.insert", {"n": 1}, context)
    assert (row["queue"], row["priority"], row["max_attempts"]) == ("ingest", 7, 3)
    assert (row["status"], row["attempt_count"], row["idempotency_key"]) == ("QUEUED", 0, "k")
    assert (row["next_retry_at"], row["lease_token"], row["finished_at"]) == (None, None, None)
    assert row["created_at"] == row["updated_at"] == row["last_wakeup_at"]
    assert transitions(found.task_id, "from_status, to_status, attempt_count") == [(None, "QUEUED", 0)]
    (wakeup,) = wakeups()
    assert (wakeup.queue, wakeup.type, wakeup.ids, wakeup.batch, wakeup.priority) == (
        "ingest", "test.insert", [found.task_id], DEFAULT_BATCH, 7,
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, 3])
def test_a_wakeup_is_not_published_before_the_commit(count: int, session: Session, stack: ServersOfTests) -> None:
    found = submit_many(session, [NewTask("test.insert") for _ in range(count)])
    wait_until_published()
    assert woken(stack) == []
    session.commit()
    wait_until_published()
    assert arrived(stack) == {str(each.task_id): 1 for each in found}
    assert [(wakeup.status, wakeup.is_leased) for wakeup in wakeups()] == [("SENT", False)]


def test_a_rolled_back_submit_publishes_no_wakeup(session: Session, stack: ServersOfTests) -> None:
    submit(session, "test.insert")
    session.rollback()
    submit_many(session, [NewTask("test.insert")] * 2)
    session.close()
    wait_until_published()
    assert nothing_is_stored()
    assert woken(stack) == []


def test_a_rolled_back_savepoint_leaves_neither_tasks_nor_wakeups(session: Session, stack: ServersOfTests) -> None:
    kept = submit(session, "test.insert")
    with session.begin_nested():
        inner = submit(session, "test.insert", key="inner")
    for how in (submit_one, submit_two):
        with suppress(RuntimeError), session.begin_nested():
            how(session)
            raise RuntimeError
    wait_until_published()
    assert woken(stack) == []
    session.commit()
    wait_until_published()
    assert arrived_ids(stack) == {kept.task_id, inner.task_id} == {row[0] for row in rows("id")}


def submit_one(session: Session) -> None:
    submit(session, "test.insert")


def submit_two(session: Session) -> None:
    submit_many(session, [NewTask("test.insert", key="a"), NewTask("test.insert")])


def test_the_relay_publishes_wakeups_of_a_connection_whose_commit_we_cannot_see(
    relay: Relay, stack: ServersOfTests
) -> None:
    with engine().begin() as connection:
        submit(connection, "test.insert")
        submit_many(connection, [NewTask("test.insert")] * 2)
    wait_until_published()
    assert [(wakeup.status, wakeup.is_leased) for wakeup in wakeups()] == [("NEW", False)] * 2
    assert woken(stack) == []
    assert relay.tick().sent == 2
    assert arrived_ids(stack) == {row[0] for row in rows("id")}


def test_a_connection_of_outbox_begin_publishes_after_its_commit_and_not_after_a_rollback(
    stack: ServersOfTests,
) -> None:
    with outbox.begin(engine()) as connection:
        found = [submit(connection, "test.insert"), *submit_many(connection, [NewTask("test.insert")] * 2)]
        wait_until_published()
        assert woken(stack) == []
    with suppress(RuntimeError), outbox.begin(engine()) as connection:
        submit(connection, "test.insert")
        raise RuntimeError
    wait_until_published()
    assert arrived_ids(stack) == {each.task_id for each in found}
    assert len(rows()) == 3


def test_a_task_that_a_handler_submits_is_not_woken_before_the_batch_commits(stack: ServersOfTests) -> None:
    seen: list[Any] = []

    def submit_another(_task: Task, db: Session) -> None:
        seen.append(submit(db, "test.insert", key="child").task_id)
        wait_until_published()
        seen.append(arrived_ids(stack))

    work.SCRIPTS["submit"] = submit_another
    with engine().begin() as connection:  # its wake-up is not published
        parent = submit(connection, "test.scripted", {"do": "submit"}).task_id
    deliver(engine(), [parent])
    wait_until_published()
    child, woken_before = seen
    assert woken_before == set()
    assert arrived_ids(stack) == {child}
    assert task(parent)["status"] == "SUCCEEDED"


def test_a_failed_handler_leaves_no_task_that_it_submitted(stack: ServersOfTests) -> None:
    def submit_and_fail(_task: Task, db: Session) -> None:
        submit(db, "test.insert", key="child")
        raise work.OnPurpose

    work.SCRIPTS["submit and fail"] = submit_and_fail
    with engine().begin() as connection:
        found = submit_many(connection, [NewTask("test.scripted", {"do": "submit and fail"}) for _ in range(2)])
    deliver(engine(), [each.task_id for each in found])
    wait_until_published()
    assert rows("type, status") == [("test.scripted", "RETRYING")] * 2
    assert woken(stack) == []


def test_a_wakeup_never_mixes_kinds_and_never_exceeds_a_batch(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGEST_QUEUES", "ingest,slow")
    settings.current.cache_clear()
    in_an_hour = datetime.now(UTC) + timedelta(hours=1)
    kinds: dict[tuple[str, str, int, datetime | None], int] = {
        ("test.many", "ingest", 5, None): 120,
        ("test.many", "ingest", 9, None): 50,
        ("test.many", "slow", 5, None): 51,
        ("test.many", "ingest", 5, in_an_hour): 60,
        ("test.insert", "ingest", 5, None): DEFAULT_BATCH + 1,
    }
    new = [
        NewTask(type, queue=queue, priority=priority, run_at=run_at)
        for (type, queue, priority, run_at), count in kinds.items()
        for _ in range(count)
    ]
    found = submit_many(session, new[::2] + new[1::2])  # mixed
    session.commit()
    sizes: dict[Any, list[int]] = {}
    for wakeup in wakeups():
        batch = {"test.many": work.MANY_BATCH, "test.insert": DEFAULT_BATCH}[wakeup.type]
        assert len(wakeup.ids) <= wakeup.batch == batch
        kind = (wakeup.type, wakeup.queue, wakeup.priority, wakeup.due_at)
        assert {*rows("type, queue, priority, next_retry_at", "id = ANY(:ids)", ids=wakeup.ids)} == {kind}
        sizes.setdefault(kind, []).append(len(wakeup.ids))
    assert {kind: sorted(size, reverse=True) for kind, size in sizes.items()} == {
        ("test.many", "ingest", 5, None): [50, 50, 20],
        ("test.many", "ingest", 9, None): [50],
        ("test.many", "slow", 5, None): [50, 1],
        ("test.many", "ingest", 5, in_an_hour): [50, 10],
        ("test.insert", "ingest", 5, None): [DEFAULT_BATCH, 1],
    }
    assert Counter(one for wakeup in wakeups() for one in wakeup.ids) == Counter(each.task_id for each in found)


def test_results_are_in_the_order_of_the_tasks(session: Session) -> None:
    new = [NewTask("test.insert", n, key=f"{7 * n % 100:02}" if n % 3 else None) for n in range(100)]
    found = submit_many(session, iter(new))
    session.commit()
    assert [task(each.task_id)["payload"] for each in found] == [*range(100)]
    assert submit_many(session, []) == []


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("wait", [timedelta(hours=2), datetime], ids=["timedelta", "datetime"])
def test_a_scheduled_task_is_not_woken_before_its_time_by_the_ledgers_clock(
    many: bool, wait: Any, session: Session, relay: Relay, stack: ServersOfTests
) -> None:
    move(stack, 86_400)  # the clock of this machine is a day behind
    now: datetime = session.execute(sql("SELECT ledger.ledger_now()")).scalar_one()
    run_at = now + timedelta(hours=2) if wait is datetime else wait
    new = NewTask("test.insert", run_at=run_at)
    found = submit_many(session, [new] * 2) if many else [submit(session, "test.insert", run_at=run_at)]
    session.commit()
    wait_until_published()
    for each in found:
        row = task(each.task_id)
        assert each.status == row["status"] == "QUEUED"
        assert row["next_retry_at"] == row["last_wakeup_at"]
        assert timedelta(hours=2) <= row["next_retry_at"] - now < timedelta(hours=2, minutes=1)
        if wait is not datetime:
            assert row["next_retry_at"] == row["created_at"] + wait
    (wakeup,) = wakeups()
    assert (wakeup.status, wakeup.is_leased, wakeup.due_at) == ("NEW", False, row["next_retry_at"])
    assert relay.tick().sent == 0
    move(stack, 7201)
    assert relay.tick().sent == 1
    assert arrived_ids(stack) == {each.task_id for each in found}


@pytest.mark.parametrize(
    "run_at",
    [timedelta(0), timedelta(days=-1), datetime(2020, 1, 1, tzinfo=UTC), datetime.min.replace(tzinfo=UTC)],
    ids=["now", "yesterday", "2020", "long ago"],
)
def test_a_task_whose_time_has_passed_is_woken_at_once(run_at: Any, session: Session, stack: ServersOfTests) -> None:
    found = [submit(session, "test.insert", run_at=run_at)]
    found += submit_many(session, [NewTask("test.insert", run_at=run_at)] * 2)
    session.commit()
    wait_until_published()
    assert rows("next_retry_at, last_wakeup_at = created_at") == [(None, True)] * 3
    assert [(wakeup.status, wakeup.due_at) for wakeup in wakeups()] == [("SENT", None)] * 2
    assert arrived_ids(stack) == {each.task_id for each in found}


def test_daylight_saving_time_does_not_change_the_length_of_a_day(session: Session) -> None:
    session.execute(sql("SET LOCAL TimeZone = 'America/New_York'"))
    waits = [timedelta(days=30 * month, microseconds=1) for month in range(1, 12)]
    found = [submit(session, "test.insert", run_at=wait) for wait in waits]
    found += submit_many(session, [NewTask("test.insert", run_at=wait) for wait in waits])
    session.commit()
    got = [row["next_retry_at"] - row["created_at"] for row in (task(each.task_id) for each in found)]
    assert got == waits * 2


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (NewTask("test.insert", "x" * 2_000_000), "payload_too_large"),
        (NewTask("test.insert", {"a": "\x00"}), "payload_has_nul"),
        (NewTask("test.nothing"), "unknown_type"),
        (NewTask("test.insert", queue="nowhere"), "unknown_queue"),
        (NewTask("test.insert", notify="nowhere"), "unknown_destination"),
        (NewTask("test.insert", priority=10), "bad_task"),
        (NewTask("test.insert", "another payload", key="taken"), "idempotency_conflict"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_one_bad_task_prevents_the_whole_call(
    bad: NewTask, code: str, session: Session, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_module, "CHUNK", 3)
    with engine().begin() as connection:
        existing = submit(connection, "test.insert", "payload", key="taken").task_id
    before = wakeups(), transitions(existing)
    good = [NewTask("test.insert", n, key=f"z{n}" if n % 2 else f"a{n}") for n in range(10)]
    with pytest.raises(CeleriacError) as refused:
        submit_many(session, [*good, bad, NewTask("test.insert")])
    assert refused.value.code == code
    session.commit()  # the transaction is still usable
    wait_until_published()
    assert rows("id") == [(existing,)]
    assert (wakeups(), transitions(existing)) == before
    assert woken(stack) == []
    assert all(each.created for each in submit_many(session, good))  # their keys are still free


def test_a_submit_sends_one_statement_and_a_submit_of_five_thousand_sends_five(session: Session) -> None:
    session.connection()
    with statements() as sent:
        submit(session, "test.insert", {"n": 1}, key="one")
    assert len(sent) == 1
    with statements() as sent:
        assert not submit(session, "test.insert", {"n": 1}, key="one").created
    assert len(sent) == 1
    with statements() as sent:
        submit_many(session, [NewTask("test.insert", n) for n in range(5000)])
    assert len(sent) == 5
    keyed = [NewTask("test.insert", n, key=str(n)) for n in range(5000)]
    with statements() as sent:
        submit_many(session, keyed)
    assert len(sent) == 5
    with statements() as sent:
        assert not any(each.created for each in submit_many(session, keyed))
    assert len(sent) == 5
    session.rollback()


def test_a_submitted_task_runs(session: Session) -> None:
    work.sink()
    found = submit_many(session, [NewTask("test.many", n) for n in range(60)])
    found.append(submit(session, "test.insert", 'quotes " and \\ and {braces}, NULL'))
    session.commit()
    deliver(engine(), [each.task_id for each in found])
    assert Counter(row[0] for row in rows("status")) == {"SUCCEEDED": 61}
    assert work.effects() == Counter(each.task_id for each in found)
