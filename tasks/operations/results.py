"""The functions with which a program follows and changes its own tasks: `tasks.get`, `wait`, `cancel` and `requeue`.

    get(id)                 the task as it is now
    wait(id, timeout=10)    the task when it is final: SUCCEEDED, DEAD or DISCARDED
    cancel(id)              QUEUED | RETRYING | RUNNING → DISCARDED; a handler that runs is interrupted
    requeue(id)             DEAD → QUEUED, attempts start again

Each uses the ledger of this process's settings, in a transaction of its own. A task that was submitted in a transaction
can be found when that transaction is committed.

Threads that wait hold no connection: one thread of the process asks the ledger for all of them, with one statement and
one connection of its own. It starts with the first wait and ends some seconds after the last one.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

import settings
from models.driver_values import array_of_ids
from models.engine import engine, make_engine
from models.errors import CeleriacError
from models.process_singleton import OnePerProcess
from models.sql import sql
from models.status import TaskStatus
from tasks.core.holders import actor
from tasks.operations import discard, retry_now
from tasks.operations.listing import FINAL, UnknownTask
from tasks.operations.poll_pace import FIRST_PAUSE_SECONDS, PollPace

logger = logging.getLogger(__name__)

IDLE_SECONDS: Final = 5.0  # after the last wait, until the thread ends
FIRST_LOOK_SECONDS: Final = 5.0  # for the first look at a task, if its timeout is shorter than that takes
STATEMENT_TIMEOUT_SECONDS: Final = 5.0
TaskId = uuid.UUID | str


class WaitTimeout(CeleriacError, TimeoutError):
    """The task was not final in time.

    `tasks.wait` was called with a timeout, and the task still waits, runs or retries.
    """

    code = "wait_timeout"
    remedy = "Wait again, or see what the task is doing with `manage.py show ID`. The task itself is not affected."
    http_status = 504


@dataclass(frozen=True, slots=True)
class TaskResult:
    """A task as the ledger has it, with its result or its last error."""

    id: uuid.UUID
    type: str
    queue: str
    status: TaskStatus
    result: Any  # what the handler returned, if the task is SUCCEEDED
    error_code: str | None
    error_message: str | None
    attempt_count: int  # failures so far
    max_attempts: int
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None

    @property
    def is_final(self) -> bool:
        return self.status in FINAL


# find: these tasks, and NULLs for ids that do not exist.
FIND: Final = f"""
    SELECT given.id, {", ".join(f"task.{field.name}" for field in fields(TaskResult))}
    FROM unnest(CAST(:ids AS uuid[])) AS given(id) LEFT JOIN ledger.ingest_task task USING (id)
"""
FIND_ALL: Final = sql(FIND)
FIND_FINAL: Final = sql(f"{FIND} WHERE task.id IS NULL OR task.finished_at IS NOT NULL")


def get(task_id: TaskId) -> TaskResult:
    """Return a task as it is now. Raises UnknownTask."""
    id_ = _parse(task_id)
    with engine().connect() as connection:
        found = _read(connection, [id_], are_final=False)[id_]
    return _known(id_, found)


def wait(task_id: TaskId, *, timeout: float | None = None) -> TaskResult:
    """Return a task when it is final. Raises UnknownTask, and WaitTimeout after `timeout` seconds.

    The ledger is asked at least once, also with a timeout of 0. The call blocks its thread: in an `async def` function,
    write `await asyncio.to_thread(tasks.wait, id)`. A handler must not wait for a task of its own queue: all worker
    processes may be waiting.
    """
    return _final_tasks().wait(_parse(task_id), timeout)


def cancel(task_id: TaskId, *, reason: str | None = None) -> TaskStatus:
    """Discard a task that waits or runs, and return its status before. Raises UnknownTask and AlreadyDone.

    A running handler is interrupted with `LeaseLost` within seconds, and nothing that it writes to the ledger's
    database is committed. A batch handler is not interrupted; its tasks run again one by one.
    """
    return discard.cancel(engine(), _parse(task_id), actor=actor(), reason=reason, even_running=True)


def requeue(task_id: TaskId, *, reason: str | None = None) -> None:
    """Queue a DEAD task again; its attempts start again. Raises UnknownTask, NotDead and KeysForgotten."""
    retry_now.requeue(engine(), _parse(task_id), actor=actor(), reason=reason)


class _Waiter:
    """A thread that waits for one task."""

    def __init__(self) -> None:
        self.has_arrived = threading.Event()
        self.was_looked_for = threading.Event()  # the ledger was asked at least once
        self.found: TaskResult | None = None  # None: there is no such task

    def arrives_within(self, seconds: float | None) -> bool:
        """Wait for the task, and in any case until the ledger was asked."""
        if not self.has_arrived.wait(None if seconds is None else min(seconds, threading.TIMEOUT_MAX)):
            self.was_looked_for.wait(FIRST_LOOK_SECONDS)
        return self.has_arrived.is_set()

    def give(self, found: TaskResult | None) -> None:
        self.found = found
        self.has_arrived.set()


class FinalTasks:
    """Waits for the end of tasks, for all threads of this process."""

    def __init__(self, current: settings.Settings) -> None:
        self.settings = current
        self._waiters: dict[uuid.UUID, set[_Waiter]] = {}
        self._changed = threading.Condition()
        self._is_wanted = False
        self._thread: threading.Thread | None = None
        self._is_failing = False

    def wait(self, task_id: uuid.UUID, seconds: float | None) -> TaskResult:
        waiter = _Waiter()
        with self._changed:
            self._waiters.setdefault(task_id, set()).add(waiter)
            self._is_wanted = True
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="wait-for-tasks", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify()
        try:
            if not waiter.arrives_within(seconds):
                why = "; the ledger is unreachable at the moment" if self._is_failing else ""
                raise WaitTimeout(f"The task {task_id} was not final after {seconds:g} s{why}.")
        finally:
            with self._changed:
                others = self._waiters[task_id]
                others.discard(waiter)
                if not others:
                    del self._waiters[task_id]
        return _known(task_id, waiter.found)

    def close(self) -> None:
        """Nothing to do: the thread ends when no thread waits."""

    def _run(self) -> None:
        own = make_engine(
            self.settings.database_url,
            application_name="celeriac-wait",
            statement_timeout_seconds=STATEMENT_TIMEOUT_SECONDS,
            pool_size=1,
        )
        try:
            pace = PollPace()
            while ids := self._wanted_ids():
                if self._look(own, ids):
                    pace.hurry()
                self._pause(pace)
        finally:
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None
            own.dispose()

    def _wanted_ids(self) -> list[uuid.UUID]:
        """Return the tasks that threads wait for. An empty list: there were none for a while, and the thread ends."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._waiters), IDLE_SECONDS):
                self._thread = None
            self._is_wanted = False
            return list(self._waiters)

    def _look(self, own: Engine, ids: Collection[uuid.UUID]) -> bool:
        """Give each waiter its task if that is final, and return whether any is."""
        try:
            with own.connect() as connection:
                found = _read(connection, ids, are_final=True)
        except (SQLAlchemyError, CeleriacError) as error:
            if not self._is_failing:  # one line for each outage
                reason = str(error).partition("\n")[0]
                logger.warning(
                    "Tasks cannot be followed at the moment: %s", reason, extra={"event": "tasks_not_followed"}
                )
            self._is_failing = True
            found = {}
        else:
            self._is_failing = False
        with self._changed:
            for id_ in ids:
                for waiter in self._waiters.get(id_, ()):
                    if id_ in found:
                        waiter.give(found[id_])
                    waiter.was_looked_for.set()
        return bool(found)

    def _pause(self, pace: PollPace) -> None:
        time.sleep(FIRST_PAUSE_SECONDS)  # so that threads that come together share a statement
        with self._changed:
            if self._changed.wait_for(lambda: self._is_wanted or not self._waiters, pace.seconds):
                pace.hurry()
            else:
                pace.slow_down()


_final_tasks: Final = OnePerProcess(FinalTasks)


def _read(connection: Connection, ids: Collection[uuid.UUID], *, are_final: bool) -> dict[uuid.UUID, TaskResult | None]:
    """Return these tasks by id; None for those that do not exist. `are_final` leaves out those that are not."""
    rows = connection.execute(FIND_FINAL if are_final else FIND_ALL, {"ids": array_of_ids(ids)})
    return {id_: None if row[0] is None else _result(row) for id_, *row in rows}


def _result(row: list[Any]) -> TaskResult:
    found = dict(zip((field.name for field in fields(TaskResult)), row, strict=True))
    return TaskResult(**{**found, "status": TaskStatus(found["status"])})


def _known(task_id: uuid.UUID, found: TaskResult | None) -> TaskResult:
    if found is None:
        raise UnknownTask(task_id)
    return found


def _parse(task_id: TaskId) -> uuid.UUID:
    if isinstance(task_id, uuid.UUID):
        return task_id
    try:
        return uuid.UUID(task_id)
    except (ValueError, AttributeError, TypeError):
        raise UnknownTask(str(task_id)[:100]) from None
