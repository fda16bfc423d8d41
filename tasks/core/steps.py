"""Durable steps: a long handler remembers what it has done, even if its worker dies.

    task.step("charge", charge, order)         stores the result in the ledger; after a retry the stored result is
                                               returned and the function is not called again
    for row in task.resume("rows", rows): …    stores the place in a long loop after every so many items

The ledger is authoritative: a step is done when its result is stored. Results are stored under the task's lease token,
so a worker that has lost its lease stores nothing and gets `LeaseLost`. A worker may die after a function has returned
and before its result is committed; the function is then called once more. So a step happens at least once and is
remembered once. To make it happen once, give the other system a key such as `f"{task.id} charge"`.

A requeue keeps the steps, unless `--reset-steps` is given. Results are JSON and come back as JSON, also the first time:
a tuple becomes a list.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, ParamSpec, TypeVar

from sqlalchemy import TextClause

from failpoint import failpoint
from models.engine import Bind, autocommit
from models.errors import LeaseLost, Misuse
from models.ledger_outage import wait_for_ledger
from models.sql import sql
from outbox.canonical_json import canonical_json
from tasks.core.lease import HeldLease

RESUME_EVERY: Final = 100
RESUME_SECONDS: Final = 5.0
NAME: Final = re.compile(r"[^\x00-\x1f\x7f]{1,200}")
NOT_DONE: Final = object()
Item = TypeVar("Item")
Given = ParamSpec("Given")

# store: writes a result if the task is RUNNING under this token; no row means that the lease is lost. The first result
# of a step stays; the place in a loop is overwritten. The row lock makes this wait for settling and reclaim, or they
# for it.
STORE: Final = sql("""
    WITH held AS MATERIALIZED (
        SELECT id FROM ledger.ingest_task WHERE id = :id AND lease_token = :token AND status = 'RUNNING'
        FOR NO KEY UPDATE)
    INSERT INTO ledger.task_step AS step (task_id, name, result, created_at)
    SELECT id, :name, CAST(:result AS jsonb), (SELECT ledger.ledger_now()) FROM held
    ON CONFLICT (task_id, name) DO UPDATE SET result = CASE WHEN :is_loop THEN excluded.result ELSE step.result END
    RETURNING result
""")
# load: all steps of a task that is RUNNING under this token; no row means that the lease is lost. A task without steps
# gives one row without a name.
LOAD: Final = sql("""
    SELECT step.name, step.result FROM ledger.ingest_task task LEFT JOIN ledger.task_step step ON step.task_id = task.id
    WHERE task.id = :id AND task.lease_token = :token AND task.status = 'RUNNING'
""")


class Steps:
    """The steps of one running task."""

    def __init__(self, engine: Bind, task_id: uuid.UUID, held: HeldLease) -> None:
        self.engine = engine
        self.task_id = task_id
        self.held = held
        self._results: dict[str, Any] | None = None
        self._loops: dict[str, bool] = {}  # for each name that was used: whether it names a loop

    def run(self, name: str, function: Callable[Given, Any], *arguments: Given.args, **options: Given.kwargs) -> Any:
        """Return the stored result, or call the function and store what it returns."""
        result = self.find(name)
        return self.keep(name, function(*arguments, **options)) if result is NOT_DONE else result

    def find(self, name: str) -> Any:
        """Return the stored result of a step, or NOT_DONE."""
        self._reserve(name, is_loop=False)
        self.held.check()
        return self._known().get(name, NOT_DONE)

    def keep(self, name: str, result: Any) -> Any:
        """Store the result of a step and return what is stored."""
        written = canonical_json(result, what=f"result of the step {name!r}")
        failpoint("steps.before_keep")
        self._known()[name] = stored = self._store(name, written, is_loop=False)
        return stored

    def check_lease(self) -> None:
        """Raise LeaseLost if this worker may no longer run the task."""
        self.held.check()

    def resume(self, name: str, items: Iterable[Item], *, every: int) -> Iterator[Item]:
        """Yield the items that are not done. An item is done when the next one is requested."""
        self._reserve(name, is_loop=True)
        if every < 1:
            raise Misuse(f"`every` is {every}; it must be at least 1.")
        stored = done = self._place(name)
        stored_at = time.monotonic()
        for place, item in enumerate(items):
            if place < stored:
                continue
            self.held.check()
            yield item
            done = place + 1
            if done - stored >= every or time.monotonic() - stored_at > RESUME_SECONDS:
                self._store_place(name, done)
                stored, stored_at = done, time.monotonic()
        if done > stored:
            self._store_place(name, done)

    def read(self, name: str) -> Any:
        """Return what is stored under this name, or None."""
        self.held.check()
        return self._known().get(name)

    def overwrite(self, name: str, value: Any) -> None:
        """Store a value that changes, such as a count. Unlike the result of a step, the last value stays."""
        self._reserve(name, is_loop=True)
        written = canonical_json(value, what=f"value of {name!r}")
        self._known()[name] = self._store(name, written, is_loop=True)

    def _reserve(self, name: str, *, is_loop: bool) -> None:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Misuse("The name of a step must be text of 1 to 200 characters without control characters.")
        if self._loops.setdefault(name, is_loop) != is_loop:
            raise Misuse(f"{name!r} names both a step and a loop of this task; each needs a name of its own.")

    def _place(self, name: str) -> int:
        stored = self._known().get(name, {"done": 0})
        if not isinstance(stored, dict) or not isinstance(stored.get("done"), int):
            raise Misuse(f"{name!r} already names a step of this task; a loop needs a name of its own.")
        return int(stored["done"])

    def _store_place(self, name: str, done: int) -> None:
        self._known()[name] = self._store(name, json.dumps({"done": done}), is_loop=True)

    def _store(self, name: str, written: str, *, is_loop: bool) -> Any:
        """Store a result unless there is one, or the place in a loop. Return what is stored now."""
        self.held.check()
        ((stored,),) = self._ask(STORE, name=name, result=written, is_loop=is_loop)
        failpoint("steps.after_keep")
        return stored

    def _known(self) -> dict[str, Any]:
        """Return the stored results by name. The first call loads all of them."""
        if self._results is None:
            self._results = {name: result for name, result in self._ask(LOAD) if name is not None}
        return self._results

    def _ask(self, statement: TextClause, **values: Any) -> list[Any]:
        """Execute a statement. Both statements may be repeated, so an unreachable ledger is waited for."""

        def execute() -> list[Any]:
            with autocommit(self.engine) as connection:
                return list(connection.execute(statement, {"id": self.task_id, "token": self.held.token, **values}))

        found = wait_for_ledger(execute)
        if not found:
            if self.held.watched is not None:
                self.held.watched.is_lost = True
            raise LeaseLost
        return found
