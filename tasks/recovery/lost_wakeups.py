"""Wake-ups that were lost on the way (P8): a broker may drop a message that it has handed out, or everything.

A task's wake-up counts as lost when the task is due, was woken longer ago than a grace, no wake-up of that age waits in the
outbox, and either the broker's queue is empty, or a task of its queue and priority that was woken later has been claimed
more than a grace ago. The grace doubles with each wake-up of a task that still waits. A million tasks in a living queue
are not woken again. Whether a message can still be there is asked of whatever carries them: `tasks/kafka/lag.py` answers
for Kafka.
"""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from models.sql import sql
from outbox.lease import connection_of
from settings import Settings
from tasks.core import wakeups
from tasks.core.due import DUE_AT, KINDS, OPEN, TIME
from tasks.core.partition_keys import STANDS, UNDONE, skipping
from tasks.core.registry import handlers

Depths = Callable[[Iterable[str]], dict[str, int]]
Lost = Callable[["Sequence[Suspect]", Settings], "Sequence[Suspect]"]

# observe: how far the broker has come, by what is being worked on.
OBSERVE: Final = sql("""
    INSERT INTO ledger.wakeup_horizon AS horizon (queue, priority, seen_wakeup_at, seen_at)
    SELECT queue, priority, max(last_wakeup_at), (SELECT ledger.ledger_now()) FROM ledger.task_lease WHERE last_wakeup_at IS NOT NULL
    GROUP BY queue, priority ORDER BY queue, priority
    ON CONFLICT (queue, priority) DO UPDATE
    SET passed_wakeup_at = horizon.seen_wakeup_at, seen_wakeup_at = excluded.seen_wakeup_at, seen_at = excluded.seen_at
    WHERE horizon.seen_at <= excluded.seen_at - make_interval(secs => :grace)
""")

# Woken longer ago than its grace, and no wake-up of that age waits in the outbox.
_SUSPECT: Final = f"""task.last_wakeup_at + make_interval(secs => :grace)
          + greatest(task.last_wakeup_at - greatest(coalesce(task.next_retry_at, task.created_at), task.updated_at), '0')
          <= (SELECT at FROM clock)
      AND NOT EXISTS (
        SELECT FROM ledger.outbox_event e
        WHERE e.destination = '{wakeups.WAKEUP}' || task.queue
          AND e.status IN ('NEW', 'RETRYING') AND e.ordering_key IS NULL
          AND coalesce(e.next_retry_at, '-infinity') <= (SELECT at FROM clock)
          AND greatest(e.created_at, e.next_retry_at) <= (SELECT at FROM clock) - make_interval(secs => :grace))"""
_COLUMNS: Final = """id, queue, priority, status, next_retry_at, created_at, updated_at,
               coalesce(last_wakeup_at, created_at) AS last_wakeup_at"""
_HORIZON: Final = """
    LEFT JOIN ledger.wakeup_horizon horizon ON horizon.queue = task.queue AND horizon.priority = task.priority"""

# suspects: of each kind the first few that are due.
SUSPECTS: Final = sql(f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at), {KINDS}
    SELECT task.id, task.queue, task.last_wakeup_at, horizon.passed_wakeup_at, (SELECT at FROM clock)
    FROM kind CROSS JOIN LATERAL (
        SELECT {_COLUMNS} FROM ledger.ingest_task
        WHERE queue = kind.queue AND type = kind.type AND {OPEN} AND {DUE_AT} <= (SELECT at FROM clock)
        ORDER BY {DUE_AT}, id LIMIT :most) AS task {_HORIZON}
    WHERE {_SUSPECT}
""")
# keyed_suspects: of each partition key the first, if it is due. From a key on, as many as we look at in one tick; the
# last column but one of each row is its key, also for those that are no suspects or have nobody who waits.
KEYED_SUSPECTS: Final = sql(f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    key (partition_key, number) AS (
        (SELECT partition_key, 1 FROM ledger.ingest_task WHERE partition_key > :after AND {UNDONE}
         ORDER BY partition_key LIMIT 1)
        UNION ALL
        SELECT next.partition_key, number + 1 FROM key CROSS JOIN LATERAL (
            SELECT partition_key FROM ledger.ingest_task WHERE partition_key > key.partition_key AND {UNDONE}
            ORDER BY partition_key LIMIT 1) AS next WHERE number < :most),
    head AS MATERIALIZED (
        SELECT task.*, key.partition_key FROM key LEFT JOIN LATERAL (
            SELECT {_COLUMNS} FROM ledger.ingest_task WHERE partition_key = key.partition_key AND {STANDS}
            ORDER BY key_seq LIMIT 1) AS task ON true)
    SELECT task.id, task.queue, task.last_wakeup_at, horizon.passed_wakeup_at, (SELECT at FROM clock), task.partition_key,
           {OPEN} AND {TIME} <= (SELECT at FROM clock) AND {_SUSPECT}
    FROM head AS task {_HORIZON} ORDER BY task.partition_key
""")

# wake_again: a new wake-up for tasks that still wait.
WAKE_AGAIN: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    held AS MATERIALIZED (
        SELECT id FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[])) AND status IN ('QUEUED', 'RETRYING')
        ORDER BY id FOR NO KEY UPDATE SKIP LOCKED),
    waiting AS (
        UPDATE ledger.ingest_task task SET last_wakeup_at = at FROM held, clock WHERE task.id = held.id
        RETURNING task.id, type, queue, priority, isolated, CAST(NULL AS timestamptz) AS due_at),
    {wakeups.wake("waiting")}
    SELECT (SELECT count(*) FROM waiting), ours FROM wakeups
""")


@dataclass(frozen=True, slots=True)
class Suspect:
    """A task whose wake-up may be lost."""

    id: uuid.UUID
    queue: str
    last_wakeup_at: datetime
    passed_wakeup_at: datetime | None
    looked_at: datetime

    @property
    def was_overtaken(self) -> bool:
        """Somebody who was woken later has long been claimed."""
        return self.passed_wakeup_at is not None and self.last_wakeup_at < self.passed_wakeup_at


def wake_again(engine: Engine, settings: Settings, *, depths: Depths, lost: Lost | None = None) -> int:
    """Wake-up once more for tasks whose wake-up was lost. The broker is asked only if there is a suspicion.

    `lost` chooses them where messages are not handed out in one order.
    """
    grace = settings.ingest_wakeup_grace_ms / 1000
    with Session(engine) as db:
        db.execute(OBSERVE, {"grace": grace})
        values = {"grace": grace, "most": settings.ingest_reclaim_batch_size}
        suspects = [Suspect(*row) for row in db.execute(SUSPECTS, values)]
        suspects += _of_keys(db, values)
        db.commit()
    if not suspects:
        return 0
    chosen = lost(suspects, settings) if lost else _lost(suspects, depths)
    return wakeup(engine, [suspect.id for suspect in chosen], {suspect.queue for suspect in chosen})


def _of_keys(db: Session, values: Mapping[str, Any]) -> list[Suspect]:
    """The next so many keys each time, and from the first again after the last."""
    after = _looked_up_to.pop("key", "")
    rows = db.execute(KEYED_SUSPECTS, {**values, "after": after, "skipping": skipping(handlers())}).all()
    if len(rows) >= values["most"]:
        _looked_up_to["key"] = rows[-1].partition_key
    return [Suspect(*row[:5]) for row in rows if row[-1]]


_looked_up_to: Final[dict[str, str]] = {}  # of this process; forgetting it costs a look


def wakeup(engine: Engine, ids: Sequence[uuid.UUID], queues: Iterable[str]) -> int:
    """Wake-up for these tasks, if they still wait; returns for how many."""
    if not ids:
        return 0
    with Session(engine) as db:
        values = {"ids": list(ids), **wakeups.wakeup_values(db, set(queues))}
        count, ours = connection_of(db).execute(WAKE_AGAIN, values).one()
        wakeups.publish_after_commit(db, ours)
        db.commit()
    return int(count)


def _lost(suspects: Sequence[Suspect], depths: Depths) -> list[Suspect]:
    waiting = depths({suspect.queue for suspect in suspects})
    return [one for one in suspects if not waiting[one.queue] or one.was_overtaken]
