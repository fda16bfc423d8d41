"""Queues that take no new tasks: an operator has paused their intake, or their backlog is too large.

`ingest_submit_many` refuses such tasks, whatever lane they come from, except those with a receipt `accepted`: that is a
promise to save them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar, Final

from sqlalchemy import Connection

from models.errors import CeleriacError
from models.sql import sql

RETRY_AFTER_SECONDS: Final = 30

# closed: why queues take no new tasks. An operator's pause is named before a backlog.
CLOSED: Final = sql("""
    SELECT DISTINCT ON (queue) queue, is_paused, reason, actor FROM (
        SELECT queue, true AS is_paused, reason, actor FROM ledger.queue_pause WHERE intake
        UNION ALL
        SELECT queue, false, NULL, NULL FROM ledger.queue_alert WHERE refuses) AS closed
    ORDER BY queue, is_paused DESC
""")


class QueueClosed(CeleriacError):
    """The queue takes no new tasks now.

    The intake of the queue was closed while the task was submitted, and is open again by now.
    """

    code = "queue_closed"
    remedy = "Submit the task again."
    http_status = 429
    retry_after_seconds: ClassVar[int] = RETRY_AFTER_SECONDS


class QueuePaused(QueueClosed):
    """The queue takes no new tasks: its intake is paused.

    An operator has run `manage.py pause QUEUE --intake`; the message names the operator and the reason.
    """

    code = "queue_paused"
    remedy = "Submit the task again later. An operator opens the intake with `manage.py resume QUEUE`."


class BacklogFull(QueueClosed):
    """The queue takes no new tasks: too many are waiting already.

    More than BACKLOG_ALERT_THRESHOLD tasks are due in the queue, and BACKLOG_POLICY is `refuse`.
    """

    code = "backlog_full"
    remedy = (
        "Submit the task again later, or add workers. The queue opens when the backlog is below 80 % of the threshold."
    )


def refusals(connection: Connection) -> dict[str, QueueClosed]:
    """Return an error for each queue that takes no new tasks."""
    found: dict[str, QueueClosed] = {}
    for queue, is_paused, reason, actor in connection.execute(CLOSED):
        if is_paused:
            why = f": {reason}" if reason else ""
            found[queue] = QueuePaused(f"The queue {queue!r} takes no new tasks; {actor} has paused its intake{why}.")
        else:
            found[queue] = BacklogFull(f"The queue {queue!r} takes no new tasks: too many are waiting already.")
    return found


def refusal_of(connection: Connection, queue: str) -> QueueClosed:
    """Return the error for a task that this queue has refused."""
    return refusals(connection).get(queue) or QueueClosed(f"The queue {queue!r} took no new tasks; submit it again.")


@contextmanager
def tasks_are_accepted() -> Iterator[None]:
    """Submit tasks even to queues that take no new ones: their submitters have a receipt `accepted`."""
    before = _accepted.set(True)
    try:
        yield
    finally:
        _accepted.reset(before)


def are_accepted() -> bool:
    """Return whether the tasks that are submitted now were accepted before."""
    return _accepted.get()


_accepted: Final = ContextVar("accepted", default=False)
