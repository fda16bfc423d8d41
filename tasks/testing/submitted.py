"""Find the tasks that the code under test has submitted in this transaction, through Python or SQL."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from models.sql import sql
from outbox.lease import Db
from tasks.testing.transaction import inside

BY_A_TEST: Final = "submitted by tasks.testing"
ANYTHING: Final = object()
SHOWN: Final = 20
LONGEST_LINE: Final = 200

# A visible row whose transaction is in progress belongs to this transaction or to a savepoint of it. `xmin` has only 32
# bits. Savepoints are numbered after their transaction, so the distance to our own number gives the full number.
_OURS: Final = "(SELECT CAST(CAST(pg_current_xact_id() AS text) AS bigint))"
_LATER: Final = f"mod(CAST(CAST(birth.xmin AS text) AS bigint) - mod({_OURS}, 4294967296) + 4294967296, 4294967296)"
BORN_HERE: Final = f"""
    CASE WHEN {_LATER} < 1000000
         THEN pg_xact_status(CAST(CAST({_OURS} + {_LATER} AS text) AS xid8)) = 'in progress' END"""

# submitted_here: tasks of this transaction in the order of their submits, without those of `tasks.testing.run`.
SUBMITTED_HERE: Final = sql(f"""
    SELECT task.id, type, payload, idempotency_key, partition_key, queue, priority, next_retry_at, status
    FROM ledger.ingest_task task JOIN ledger.ingest_task_transition birth ON birth.task_id = task.id
    WHERE birth.from_status IS NULL AND birth.message IS DISTINCT FROM :by_a_test AND {BORN_HERE}
    ORDER BY birth.id
""")


@dataclass(frozen=True, slots=True)
class SubmittedTask:
    """A task that was submitted, as the ledger has it."""

    task_id: uuid.UUID
    type: str
    payload: Any
    key: str | None
    partition_key: str | None
    queue: str
    priority: int
    run_at: datetime | None  # None: due at once
    status: str

    def __str__(self) -> str:
        more = {"key": self.key, "partition_key": self.partition_key, "run_at": self.run_at}
        options = "".join(f" {name}={str(value)!r}" for name, value in more.items() if value is not None)
        line = f"{self.type} {json.dumps(self.payload, ensure_ascii=False)}{options}"
        return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 1]}…"


def submitted(
    db: Db, *, type: str | None = None, payload: Any = ANYTHING, key: str | None = None, **also: Any
) -> list[SubmittedTask]:
    """Return the submitted tasks that match. A task's payload may have more names than `payload`, at any depth.

    `also`: partition_key=, queue=, priority=, run_at=, status=.
    """
    wanted = {**also, **{name: value for name, value in (("type", type), ("key", key)) if value is not None}}
    return [
        task
        for task in _all(db)
        if all(getattr(task, name) == value for name, value in wanted.items()) and _has(task.payload, payload)
    ]


def assert_submitted(
    db: Db,
    *,
    type: str | None = None,
    payload: Any = ANYTHING,
    key: str | None = None,
    count: int | None = None,
    **also: Any,
) -> list[SubmittedTask]:
    """Assert that at least one task matches, or exactly `count`; return them. The error lists what was submitted."""
    __tracebackhide__ = True
    found = submitted(db, type=type, payload=payload, key=key, **also)
    if (len(found) == count) if count is not None else found:
        return found
    named: dict[str, Any] = {"type": type, "payload": payload, "key": key, **also}
    options = ", ".join(
        f"{name}={value!r}" for name, value in named.items() if value is not None and value is not ANYTHING
    )
    wanted = "at least 1 task" if count is None else f"{count} task{'' if count == 1 else 's'}"
    raise AssertionError(f"Expected {wanted} with {options or 'anything'}, found {len(found)}.\n{_listed(_all(db))}")


def _all(db: Db) -> list[SubmittedTask]:
    with inside(db) as connection:
        rows = connection.execute(SUBMITTED_HERE, {"by_a_test": BY_A_TEST})
        return [SubmittedTask(*row) for row in rows]


def _has(whole: Any, part: Any) -> bool:
    """Return whether `part` equals `whole`, where objects in `whole` may have more names, at any depth."""
    if part is ANYTHING:
        return True
    if isinstance(part, Mapping) and isinstance(whole, Mapping):
        return all(name in whole and _has(whole[name], value) for name, value in part.items())
    return bool(whole == part)


def _listed(tasks: Sequence[SubmittedTask]) -> str:
    if not tasks:
        return "Nothing was submitted in this transaction."
    lines = [f"  {task}" for task in tasks[:SHOWN]]
    more = [f"  and {len(tasks) - SHOWN} more"] if len(tasks) > SHOWN else []
    return "\n".join(["Submitted in this transaction:", *lines, *more])
