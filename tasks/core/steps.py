"""Durable steps (P11): what a long handler has done stays done, whatever becomes of its worker.

    task.step("charge", charge, order)         the result is stored in the ledger; after a retry it is returned, and the
                                               function is not called again
    for row in task.resume("rows", rows): …    a place in a long loop, stored after every so many items

A step is written under the task's token: a worker whose lease was lost can store nothing, and is told by `LeaseLost`.
Between the end of a function and the COMMIT of its result there is a gap in which a worker may die: the step then runs
once more. So a step happens at least once and is remembered once; give the other side a key, `f"{task.id} charge"`, and
it happens once. A requeue keeps the steps (`--reset-steps` forgets them). Results are JSON, and come back as JSON says
them, the first time too: a tuple is a list.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, ParamSpec, TypeVar

from sqlalchemy import TextClause
from sqlalchemy.exc import DBAPIError

from failpoint import failpoint
from models.engine import Bind, at_once
from models.errors import LeaseLost, Misuse, Unreachable
from models.sql import sql
from outbox.canonical import canonical_json
from tasks.core.lease import Held

RESUME_EVERY: Final = 100
RESUME_SECONDS: Final = 5.0
NAME: Final = re.compile(r"[^\x00-\x1f\x7f]{1,200}")
Item = TypeVar("Item")
Given = ParamSpec("Given")

# The row is locked as settling and reclaim lock it: they come before, and nothing is written, or after.
_HELD: Final = """
    held AS MATERIALIZED (
        SELECT id FROM ledger.ingest_task WHERE id = :id AND lease_token = :token AND status = 'RUNNING' FOR NO KEY UPDATE)"""

# keep: the first write of a step wins; whose lease is lost writes nothing.
KEEP: Final = sql(f"""
    WITH {_HELD},
    kept AS (
        INSERT INTO ledger.task_step (task_id, name, result, created_at)
        SELECT id, :name, CAST(:result AS jsonb), (SELECT ledger.ledger_now()) FROM held
        ON CONFLICT (task_id, name) DO UPDATE SET name = excluded.name RETURNING task_step.result)
    SELECT result FROM kept
""")  # noqa: S608 - a literal of this file
# move_on: how far a loop has come.
MOVE_ON: Final = sql(f"""
    WITH {_HELD},
    kept AS (
        INSERT INTO ledger.task_step (task_id, name, result, created_at)
        SELECT id, :name, CAST(:result AS jsonb), (SELECT ledger.ledger_now()) FROM held
        ON CONFLICT (task_id, name) DO UPDATE SET result = excluded.result RETURNING result)
    SELECT result FROM kept
""")  # noqa: S608 - a literal of this file
# known: what is stored, for its holder, and one row without a name if that is nothing; no row for anybody else.
KNOWN: Final = sql("""
    SELECT step.name, step.result FROM ledger.ingest_task task LEFT JOIN ledger.task_step step ON step.task_id = task.id
    WHERE task.id = :id AND task.lease_token = :token AND task.status = 'RUNNING'
""")


class StepsLost(Unreachable):
    """The ledger could not be asked about the steps of this task."""


class Steps:
    """The steps of one running task."""

    def __init__(self, engine: Bind, task_id: uuid.UUID, held: Held) -> None:
        self.engine = engine
        self.task_id = task_id
        self.held = held
        self._results: dict[str, Any] | None = None
        self._loops: dict[str, bool] = {}  # whether a name belongs to one

    def run(self, name: str, function: Callable[Given, Any], *arguments: Given.args, **options: Given.kwargs) -> Any:
        """What the function returned, the first time it returned."""
        self._use(name, is_loop=False)
        self.check_lease()
        known = self._known()
        if name not in known:
            written = canonical_json(function(*arguments, **options), what=f"result of the step {name!r}")
            failpoint("steps.before_keep")
            known[name] = self._write(KEEP, name, written)
        return known[name]

    def resume(self, name: str, items: Iterable[Item], *, every: int) -> Iterator[Item]:
        """An item is done when the next one is asked for."""
        self._use(name, is_loop=True)
        if every < 1:
            raise Misuse("A place in a loop is kept after every item at most: `every` is at least 1.")
        kept = done = self._place(name)
        kept_at = time.monotonic()
        for place, item in enumerate(items):
            if place < kept:
                continue
            self.check_lease()
            yield item
            done = place + 1
            if done - kept >= every or time.monotonic() - kept_at > RESUME_SECONDS:
                self._move_on(name, done)
                kept, kept_at = done, time.monotonic()
        if done > kept:
            self._move_on(name, done)

    def check_lease(self) -> None:
        if not self.held.is_good:
            raise LeaseLost

    def _use(self, name: str, *, is_loop: bool) -> None:
        """What a loop stores is no result of a step, and the other way round."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Misuse("The name of a step is text of 1 to 200 characters without control characters.")
        if self._loops.setdefault(name, is_loop) != is_loop:
            raise Misuse(f"{name!r} names a step and a loop of this task: each needs a name of its own.")

    def _place(self, name: str) -> int:
        kept = self._known().get(name, {"done": 0})
        if not isinstance(kept, dict) or not isinstance(kept.get("done"), int):
            raise Misuse(f"{name!r} is a step of this task already: a loop needs a name of its own.")
        return int(kept["done"])

    def _move_on(self, name: str, done: int) -> None:
        self._known()[name] = self._write(MOVE_ON, name, json.dumps({"done": done}))

    def _write(self, statement: TextClause, name: str, written: str) -> Any:
        """Returns what is stored now."""
        self.check_lease()
        ((kept,),) = self._ask(statement, {"name": name, "result": written})
        failpoint("steps.after_keep")
        return kept

    def _known(self) -> dict[str, Any]:
        """All of them in one look, when the first is asked for."""
        if self._results is None:
            self._results = {name: result for name, result in self._ask(KNOWN, {}) if name is not None}
        return self._results

    def _ask(self, statement: TextClause, values: Mapping[str, Any]) -> list[Any]:
        """Once more if the answer is lost, which does no harm: a function that ran would have to run again."""
        try:
            try:
                found = self._answer(statement, values)
            except DBAPIError:
                found = self._answer(statement, values)
        except (DBAPIError, Unreachable) as error:
            raise StepsLost from error
        if not found:
            if self.held.watched is not None:
                self.held.watched.is_lost = True
            raise LeaseLost
        return found

    def _answer(self, statement: TextClause, values: Mapping[str, Any]) -> list[Any]:
        with at_once(self.engine) as connection:
            given = {"id": self.task_id, "token": self.held.token, **values}
            return list(connection.execute(statement, given))
