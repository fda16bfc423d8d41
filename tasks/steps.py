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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, ParamSpec, TypeVar

from sqlalchemy import text

from failpoint import failpoint
from models.engine import Bind, at_once
from models.errors import Misuse
from outbox.canonical import canonical_json
from tasks.heartbeat import Held
from tasks.outcomes import LeaseLost

RESUME_EVERY: Final = 100
RESUME_SECONDS: Final = 5.0
NAME: Final = re.compile(r"[^\x00-\x1f\x7f]{1,200}")
Item = TypeVar("Item")
Given = ParamSpec("Given")

# The row is locked as settling and reclaim lock it: they come before, and nothing is written, or after.
_HELD: Final = """
    held AS MATERIALIZED (
        SELECT id FROM ingest_task WHERE id = :id AND lease_token = :token AND status = 'RUNNING' FOR NO KEY UPDATE)"""

# keep: the first write of a step wins; whose lease is lost writes nothing.
KEEP: Final = text(f"""
    WITH {_HELD},
    kept AS (
        INSERT INTO task_step (task_id, name, result, created_at)
        SELECT id, :name, CAST(:result AS jsonb), (SELECT ledger_now()) FROM held
        ON CONFLICT (task_id, name) DO NOTHING)
    SELECT id FROM held
""")  # noqa: S608 - a literal of this file
# move_on: how far a loop has come.
MOVE_ON: Final = text(f"""
    WITH {_HELD},
    kept AS (
        INSERT INTO task_step (task_id, name, result, created_at)
        SELECT id, :name, CAST(:result AS jsonb), (SELECT ledger_now()) FROM held
        ON CONFLICT (task_id, name) DO UPDATE SET result = excluded.result)
    SELECT id FROM held
""")  # noqa: S608 - a literal of this file
KNOWN: Final = text("SELECT name, result FROM task_step WHERE task_id = :id")


class Steps:
    """The steps of one running task."""

    def __init__(self, engine: Bind, task_id: uuid.UUID, held: Held) -> None:
        self.engine = engine
        self.task_id = task_id
        self.held = held
        self._results: dict[str, Any] | None = None
        self._is_lost = False  # this task; others of its batch may still be ours

    def run(self, name: str, function: Callable[Given, Any], *arguments: Given.args, **options: Given.kwargs) -> Any:
        """What the function returned, the first time it returned."""
        _check(name)
        self.check_lease()
        known = self._known()
        if name not in known:
            written = canonical_json(function(*arguments, **options), what=f"result of the step {name!r}")
            failpoint("steps.before_keep")
            self._write(KEEP, name, written)
            known[name] = json.loads(written)
        return known[name]

    def resume(self, name: str, items: Iterable[Item], *, every: int) -> Iterator[Item]:
        """An item is done when the next one is asked for."""
        _check(name)
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
        if self._is_lost or not self.held.is_good:
            raise LeaseLost

    def _place(self, name: str) -> int:
        kept = self._known().get(name, {"done": 0})
        if not isinstance(kept, dict) or not isinstance(kept.get("done"), int):
            raise Misuse(f"{name!r} is a step of this task already: a loop needs a name of its own.")
        return int(kept["done"])

    def _move_on(self, name: str, done: int) -> None:
        self._known()[name] = {"done": done}
        self._write(MOVE_ON, name, json.dumps({"done": done}))

    def _write(self, statement: Any, name: str, written: str) -> None:
        self.check_lease()
        values = {"id": self.task_id, "token": self.held.token, "name": name, "result": written}
        with at_once(self.engine) as connection:
            if connection.execute(statement, values).first() is None:
                self._is_lost = True
                raise LeaseLost
        failpoint("steps.after_keep")

    def _known(self) -> dict[str, Any]:
        """All of them in one look, when the first is asked for."""
        if self._results is None:
            with at_once(self.engine) as connection:
                self._results = dict(map(tuple, connection.execute(KNOWN, {"id": self.task_id})))
        return self._results


def _check(name: str) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Misuse("The name of a step is text of 1 to 200 characters without control characters.")
