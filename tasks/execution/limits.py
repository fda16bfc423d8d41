"""Admit tasks of handlers with limits: how many run at once, and how many start in a time, over all workers.

    claim ──LIMITED──► lock the limits ─► admit ─┬─ may start ─► RUNNING, as any other claim
                                                 └─ may not ──► it waits, out of the way of all other claims

`task_limit` has one row for each type and value of `limit_by`. Its lock is held from the decision to the commit, by
claims and by every transaction in which a task stops running. So the number of running tasks, which is counted in
`ingest_task`, cannot change in between, and a place that becomes free is seen: by the claim, or by the one who frees
it, who then wakes the next waiting tasks. Nothing has to be given back after a crash: reclaim ends RUNNING, and with it
the place. The tokens of a rate are spent when a task is claimed, whatever becomes of it.

A task that waits has `limited_at`. It is not in the index of due tasks, so a tenant with a hundred thousand waiting
tasks slows no other. It is woken when a place is free or a token is there; `recovery/limited_tasks.py` repairs what is
lost on the way. See docs/protocol.md, Limits.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import settings
from models.driver_values import array, array_of_ids
from models.prepared_statements import Prepared
from outbox.lease import Db, connection_of
from tasks.core import batch_size, wakeups
from tasks.core.lease import HeldLease
from tasks.core.limits import Limits, limit_values
from tasks.core.registry import Handler, handlers
from tasks.execution.claim import Claim, claim
from tasks.execution.limit_statements import ADMIT, LOCK_FOR_CLAIM, LOCK_KEYS, LOCK_OF_TASKS


def claim_admitted(
    db: Db,
    ids: Sequence[str | uuid.UUID],
    *,
    handlers: Mapping[str, Handler],
    holder: str,
    lease_seconds: float,
    token: uuid.UUID,
    durable: bool = False,
) -> Claim:
    """Claim a batch of tasks with limits, as far as the limits allow; let the others wait. The caller commits.

    The batch may have other tasks than `ids`: those that have waited longer for the same limits. `left` of the claim
    are tasks of another type, for the next claim.
    """
    limits = _limits_of(handlers)
    most = {each.type: batch_size.batch_to_claim(handlers[each.type]) for each in limits}
    deadline = time.monotonic() + lease_seconds
    given = array_of_ids(ids)
    admitted = _admit(db, _lock(db, LOCK_FOR_CLAIM, limits, ids=given), limits, ids=given, most=most)
    if admitted is None or not admitted.taken:
        found = Claim(HeldLease(token, deadline))
    else:
        found = claim(
            connection_of(db),
            admitted.taken,
            handlers={admitted.type: handlers[admitted.type]},
            holder=holder,
            lease_seconds=lease_seconds,
            token=token,
            keyed=admitted.keyed,
            durable=durable,
            admitted=True,
            batch_of=lambda _: len(admitted.taken),
        )
    if admitted is not None:
        found.not_due.extend(admitted.waiting)
        found.left = list(admitted.left_over)
    decided = {task.id for task in found.tasks} | {*found.not_due, *found.paused, *found.left}
    found.skipped = [id_ for each in ids if (id_ := uuid.UUID(str(each))) not in decided]
    return found


def wake_waiting(db: Db, ids: Iterable[uuid.UUID], *, limits: Collection[Limits] | None = None) -> int:
    """Wake the tasks that may start because these tasks stopped running; return their number.

    It belongs in the transaction that settles or discards them. `limits`: if not those of this process's handlers.
    """
    given = _limits_of(handlers()) if limits is None else limits
    row = _admit(db, _lock(db, LOCK_OF_TASKS, given, ids=array_of_ids(ids)), given)
    return row.woken if row else 0


def wake_waiting_for(db: Db, keys: Sequence[tuple[str, str]], *, limits: Collection[Limits]) -> int:
    """Wake the tasks that may start under these limits, given as pairs of type and limit key; return their number."""
    row = _admit(db, _lock(db, LOCK_KEYS, limits, **_key_values(keys)), limits)
    return row.woken if row else 0


def has_places(handler: Handler) -> bool:
    """Return True if a task of this handler occupies a place while it runs, which must be given to the next one."""
    return handler.limits is not None and handler.limits.max_running is not None


def _limits_of(handlers: Mapping[str, Handler]) -> list[Limits]:
    return [handler.limits for handler in handlers.values() if handler.limits]


def _lock(db: Db, statement: Prepared, limits: Iterable[Limits], **values: Any) -> list[tuple[str, str]]:
    """Lock limits, refill their tokens, and return their types and limit keys."""
    rows = statement.execute(connection_of(db), {**limit_values(limits), **values})
    return [(row.type, row.limit_key) for row in rows]


def _admit(
    db: Db,
    locked: Sequence[tuple[str, str]],
    limits: Iterable[Limits],
    *,
    ids: str = "{}",
    most: Mapping[str, int] | None = None,
) -> Any:
    """Admit tasks under the limits that are locked, and return the row of ADMIT; None if none is locked."""
    if not locked:
        return None
    values = {
        **limit_values(limits),
        **_key_values(locked),
        **wakeups.lease_values(db, settings.current().ingest_queues),
        "ids": ids,
        "most": json.dumps(most or {}),
        "batches": json.dumps({type: _wakeup_batch(type) for type, _ in locked}),
    }
    row = ADMIT.execute(connection_of(db), values).one()
    wakeups.publish_after_commit(db, row.ours)
    return row


def _key_values(keys: Sequence[tuple[str, str]]) -> dict[str, str]:
    return {"key_types": array(type for type, _ in keys), "limit_keys": array(key for _, key in keys)}


def _wakeup_batch(type: str) -> int:
    """Return how many waiting tasks are woken with one message: as many as one claim takes."""
    handler = handlers().get(type)
    return 1 if handler is None or batch_size.is_one_at_a_time(handler) else batch_size.batch_of(handler)
