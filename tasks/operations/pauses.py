"""Pause and resume queues: a row in the ledger, so a pause holds for all workers and survives restarts.

A paused queue starts no tasks: the claim looks for the row each time, and wake-ups are not published. Tasks that run
are not interrupted. With `intake`, the queue takes no new tasks, and those that it has still run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, Engine

from models.driver_values import storable
from models.errors import CeleriacError
from models.sql import sql
from settings import Settings
from tasks.core import holders
from tasks.core.registered_types import registered_queues
from tasks.core.wakeups import Woken
from tasks.operations.rebuild_broker import wake_all_due

logger = logging.getLogger(__name__)

REASON_LIMIT: Final = 500

# pause: → paused. A pause that exists gets the new reason, and keeps its time.
PAUSE: Final = sql("""
    INSERT INTO ledger.queue_pause AS pause (queue, intake, reason, actor, created_at)
    VALUES (:queue, :intake, :reason, :actor, (SELECT ledger.ledger_now()))
    ON CONFLICT (queue, intake) DO UPDATE SET reason = excluded.reason, actor = excluded.actor
    RETURNING queue, intake, reason, actor, created_at
""")
# resume: paused → not paused.
RESUME: Final = sql("""
    DELETE FROM ledger.queue_pause WHERE queue = :queue AND (intake OR NOT :intake_only)
    RETURNING queue, intake, reason, actor, created_at
""")
PAUSES: Final = sql("SELECT queue, intake, reason, actor, created_at FROM ledger.queue_pause ORDER BY queue, intake")


class NoSuchQueue(CeleriacError):
    """There is no such queue.

    The name is misspelt, or the queue is not in INGEST_QUEUES of any worker.
    """

    code = "no_such_queue"
    remedy = "Use one of the queues that the message lists; `manage.py queues` shows them."
    http_status = 404
    exit_code = 2


@dataclass(frozen=True, slots=True)
class QueuePause:
    """A pause of a queue, or only of its intake: by whom, why and since when."""

    queue: str
    intake: bool
    reason: str | None
    actor: str
    since: datetime


def pause_queue(
    engine: Engine, settings: Settings, queue: str, *, actor: str, reason: str | None = None, intake: bool = False
) -> QueuePause:
    """Let no task of the queue start; with `intake`, refuse new tasks instead."""
    values = {"queue": queue, "intake": intake, "reason": reason and storable(reason[:REASON_LIMIT]), "actor": actor}
    with engine.begin() as connection:
        require_queue(connection, settings, queue)
        paused = QueuePause(*connection.execute(PAUSE, values).one())
    details = {"event": "queue_paused", "queue": queue, "intake": intake, "actor": actor}
    logger.info("%s has paused the %s %s: %s", actor, _part(paused), queue, paused.reason, extra=details)
    return paused


def resume_queue(
    engine: Engine, settings: Settings, queue: str, *, intake_only: bool = False, actor: str | None = None
) -> list[QueuePause]:
    """End the pauses of a queue, or only that of its intake; return them. `wake_resumed` must follow."""
    actor = actor or holders.actor()
    with engine.begin() as connection:
        require_queue(connection, settings, queue)
        ended = [QueuePause(*row) for row in connection.execute(RESUME, {"queue": queue, "intake_only": intake_only})]
    for pause in ended:
        details = {"event": "queue_resumed", "queue": queue, "intake": pause.intake, "actor": actor}
        logger.info("%s has resumed the %s %s, paused by %s", actor, _part(pause), queue, pause.actor, extra=details)
    return ended


def wake_resumed(engine: Engine, ended: list[QueuePause]) -> Iterator[Woken]:
    """Wake what is due in a queue that was resumed; yield the total so far after each page.

    If this does not come to its end, `recovery/lost_wakeups.py` wakes the rest.
    """
    for pause in ended:
        if not pause.intake:
            yield from wake_all_due(engine, queue=pause.queue)


def wake_resumed_in_thread(engine: Engine, ended: list[QueuePause]) -> None:
    """Do the same in a thread, because waking a million tasks takes longer than a request may."""

    def wake() -> None:
        for _ in wake_resumed(engine, ended):
            pass

    threading.Thread(target=wake, name="wake-resumed", daemon=True).start()


def read_pauses(connection: Connection) -> list[QueuePause]:
    return [QueuePause(*row) for row in connection.execute(PAUSES)]


def _part(pause: QueuePause) -> str:
    return "intake of the queue" if pause.intake else "queue"


def require_queue(connection: Connection, settings: Settings, queue: str) -> None:
    """Raise NoSuchQueue if neither this process nor a worker knows the queue."""
    known = sorted({*settings.ingest_queues, *registered_queues(connection)})
    if queue not in known:
        raise NoSuchQueue(f"There is no queue {queue[:100]!r}; the queues are {', '.join(known)}.")
