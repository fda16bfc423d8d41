"""Submit, claim and run tasks in this process, without Celery, and read what the ledger and the counters say."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, event

import settings
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tally.counts import counts
from tally.fold import fold
from tally.subjects import Subject
from tally.totals import Total, read_totals
from tasks import NewTask, submit_many
from tasks.core import registry
from tasks.core.outcomes import Verdict
from tasks.core.registry import Handler, find, handler, handlers
from tasks.core.task import Task
from tasks.execution.claim import Claim, claim
from tasks.execution.deliver import deliver
from tasks.execution.run import run
from tests.tasks.work import SCRIPTS, effects, insert, register, sink, task, transitions

WAITING = sql("SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = :pid")
AUDITS = sql("SELECT task_id, code FROM ledger.task_audit ORDER BY id")


@contextmanager
def clean_sink() -> Iterator[None]:
    """Register the handlers of the tests and empty their sink; at the end, wait until every wake-up is published."""
    register()
    sink()
    try:
        yield
    finally:
        SCRIPTS.clear()
        assert after_commit_publisher().wait_until_idle(20), stack_of("outbox-after-commit")


def stack_of(thread: str) -> str:
    """Return what a thread is doing, for a test that waits for it in vain."""
    idents = {each.ident for each in threading.enumerate() if each.name == thread}
    frames = [frame for ident, frame in sys._current_frames().items() if ident in idents]
    return "".join("".join(traceback.format_stack(frame)) for frame in frames) or f"there is no thread {thread}"


def submitted(count: int = 1, type: str = "test.insert", payload: Any = None, **how: Any) -> list[uuid.UUID]:
    """Submit tasks in one transaction. A callable payload is called with the number of each task."""
    payloads: list[Any] = [payload(n) if callable(payload) else payload for n in range(count)]
    news = [NewTask(type, each, **how) for each in payloads]
    with sessions()() as session:
        ids = [each.task_id for each in submit_many(session, news)]
        session.commit()
    return ids


def scripted(script: Callable[[Task, Any], Any], count: int = 1, **how: Any) -> list[uuid.UUID]:
    """Submit tasks that run this script; payload["n"] is the number of the task."""
    name = f"script {len(SCRIPTS)}"
    SCRIPTS[name] = script
    return submitted(count, "test.scripted", lambda n: {"do": name, "n": n}, **how)


def inserting(does: dict[int, Callable[[Task, Any], Any]], count: int, **how: Any) -> list[uuid.UUID]:
    """Submit tasks that insert a row into the sink; those with a number in `does` call that as well."""

    def script(each: Task, db: Any) -> Any:
        insert(each, db)
        more = does.get(each.payload["n"])
        said = more(each, db) if more else None
        return said if isinstance(said, Verdict) else None

    return scripted(script, count, **how)


def raising(error: BaseException) -> Callable[[Task, Any], Any]:
    """Return a script that raises this error."""

    def script(_task: Task, _db: Any) -> None:
        raise error

    return script


def claimed(
    ids: Sequence[uuid.UUID], *, connection: Connection | None = None, holder: str = "another:1", **how: Any
) -> Claim:
    """Claim tasks as another worker would."""
    how = {"handlers": handlers(), "lease_seconds": 60, **how}
    if connection is None:
        with engine().connect() as own:
            return claimed(ids, connection=own, holder=holder, **how)
    found = claim(connection, ids, holder=holder, **how)
    connection.commit()
    return found


def claimed_in_turn(ids: Sequence[uuid.UUID]) -> Claim:
    """Claim tasks with a partition key as another worker would."""
    return claimed(ids, keyed=True)


def run_claim(claim: Claim, **changes: Any) -> None:
    """Run a claim in this process, as a worker does after it has claimed."""
    handler = dataclasses.replace(find(claim.tasks[0].type), **changes)
    claim.begin(engine(), handler, lease_seconds=settings.current().ingest_lease_seconds)
    run(claim)


def delivered(ids: Sequence[Any]) -> None:
    """Run these tasks as a worker does when a message with their ids arrives."""
    deliver(engine(), ids)


@contextmanager
def handled(type: str, function: Callable[..., Any], **how: Any) -> Iterator[Handler]:
    """Register a handler for the duration of the block."""
    handlers()
    before = registry._registered.pop(type, None)  # a type has one handler
    try:
        handler(type, **how)(function)
        yield handlers()[type]
    finally:
        registry._registered.pop(type, None)
        if before:
            registry._registered[type] = before


def are_well(ids: Sequence[uuid.UUID], *bad: int) -> None:
    """Assert that all tasks but the bad ones succeeded in their first claim with one effect, and the bad have none."""
    well = [id_ for place, id_ in enumerate(ids) if place not in bad]
    found = {id_: (task(id_)["status"], task(id_)["attempt_count"], len(transitions(id_))) for id_ in well}
    assert found == dict.fromkeys(well, ("SUCCEEDED", 0, 3))
    assert effects() == dict.fromkeys(well, 1)
    assert leases() == 0


def leases() -> int:
    return int(scalar("SELECT count(*) FROM ledger.task_lease"))


class BatchClock:
    """The clock of `tasks/execution/claim.py`: time passes only when a handler says so."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def audits() -> list[tuple[uuid.UUID, str]]:
    with engine().begin() as connection:
        return [tuple(row) for row in connection.execute(AUDITS)]


def scalar(statement: str, **values: Any) -> Any:
    with engine().begin() as connection:
        return connection.execute(sql(statement), values).scalar_one()


def change(task_id: uuid.UUID, changes: str) -> None:
    """Update a task by hand."""
    with engine().begin() as connection:
        connection.execute(sql(f"UPDATE ledger.ingest_task SET {changes} WHERE id = :id"), {"id": task_id})


def take_away(task_id: uuid.UUID) -> uuid.UUID:
    """Give the task to another holder and return that holder's token."""
    token = uuid.uuid4()
    change(task_id, f"lease_token = '{token}'")
    return token


def counted(subject: Subject = Subject.TASK) -> Counter[str]:
    """Return how many deliveries, or other subjects, the tally has, by result."""
    return Counter({result: sum(total.count for total in totals) for result, totals in _by_result(subject).items()})


def timed() -> Counter[str]:
    """Return of how many deliveries the tally knows the seconds in the handler, by result."""
    return Counter(
        {result: sum(sum(total.run) for total in totals) for result, totals in _by_result(Subject.TASK).items()}
    )


def _by_result(subject: Subject) -> dict[str, list[Total]]:
    counts.append()
    fold(engine(), budget_seconds=60)
    found: dict[str, list[Total]] = {}
    with engine().connect() as connection:
        for total in read_totals(connection):
            if total.subject is subject:
                found.setdefault(total.result, []).append(total)
    return found


@contextmanager
def watching(target: Engine | Connection, name: str, seen: Callable[..., object]) -> Iterator[None]:
    """Listen to an event of SQLAlchemy in the block."""
    event.listen(target, name, seen)
    try:
        yield
    finally:
        event.remove(target, name, seen)


@contextmanager
def at_commit(target: Engine | Connection, seen: Callable[[Connection], object]) -> Iterator[None]:
    """Call `seen` right before each commit in the block."""
    with watching(target, "commit", seen):
        yield


@contextmanager
def statements() -> Iterator[list[str]]:
    """Collect the statements that this process sends, without PREPARE."""
    sent: list[str] = []

    def note(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.startswith("PREPARE"):
            sent.append(" ".join(statement.split()))

    with watching(engine(), "before_cursor_execute", note):
        yield sent


def wait_until_blocked(pid: int) -> None:
    """Wait until this backend waits for a lock."""
    deadline = time.monotonic() + 20
    while not scalar(str(WAITING), pid=pid):
        assert time.monotonic() < deadline, f"the backend {pid} does not wait for a lock"
        time.sleep(0.001)
