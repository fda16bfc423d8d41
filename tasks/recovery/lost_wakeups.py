"""Find wake-ups that were lost on the way, and send them again.

A broker may lose a message that it has handed out, or all of its messages. The ledger is authoritative: a needless
wake-up is harmless, because the claim decides what runs. A task's wake-up counts as lost when all of this holds:

- its queue is not paused;
- the task is due, and its last wake-up is older than a grace (`INGEST_WAKEUP_GRACE_MS`), which doubles with each
  wake-up of a task that still waits;
- no wake-up of that age waits in the outbox;
- the broker's queue is empty, or a task of the same queue and priority that was woken later was claimed more than a
  grace ago.

So a million tasks that wait in a working queue are not woken again. If a whole page of tasks waits for wake-ups that an
empty queue no longer has, the broker has lost all of them, and the following pages do not wait for their grace.

Kafka does not hand out messages in one order; `tasks/kafka/lag.py` replaces the third condition there. Tasks that wait
for a limit are left to `limited_tasks.py`. See docs/protocol.md, Lost wake-ups.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from models.sql import sql
from outbox.destinations import CELERY
from settings import Settings
from tasks.core import wakeups
from tasks.core.due_times import DUE_AT, IS_PAUSED, KINDS, OPEN, TIME
from tasks.core.partition_keys import BLOCKS, UNDONE, skipping
from tasks.core.registry import handlers

Depths = Callable[[Iterable[str]], dict[str, int]]
PAGE: Final = 1000  # due tasks in one transaction
REST_PAGE: Final = 5000  # the same, after the broker has lost all messages
BUDGET_SECONDS: Final = 4.0  # below the interval of reclaim
Lost = Callable[["Sequence[OverdueTask]", Settings], "Sequence[OverdueTask]"]

# record_progress: remember the latest wake-up among the claimed tasks of each queue and priority, once per grace. The
# one that was remembered a grace ago becomes `passed_wakeup_at`: older wake-ups of tasks that still wait are lost.
RECORD_PROGRESS: Final = sql("""
    INSERT INTO ledger.wakeup_horizon AS horizon (queue, priority, seen_wakeup_at, seen_at)
    SELECT queue, priority, max(last_wakeup_at), (SELECT ledger.ledger_now()) FROM ledger.task_lease
    WHERE last_wakeup_at IS NOT NULL GROUP BY queue, priority ORDER BY queue, priority
    ON CONFLICT (queue, priority) DO UPDATE
    SET passed_wakeup_at = horizon.seen_wakeup_at, seen_wakeup_at = excluded.seen_wakeup_at, seen_at = excluded.seen_at
    WHERE horizon.seen_at <= excluded.seen_at - make_interval(secs => :grace)
""")

# The task was woken longer ago than its grace, and no wake-up of that age waits in the outbox. The grace of a task that
# was woken again is longer by the time between its first and its last wake-up, so it doubles each time.
IS_OVERDUE: Final = f"""task.last_wakeup_at + make_interval(secs => :grace) + greatest(task.last_wakeup_at
          - greatest(coalesce(task.next_retry_at, task.created_at), task.updated_at), '0') <= (SELECT at FROM clock)
      AND NOT EXISTS (
        SELECT FROM ledger.outbox_event e
        WHERE e.destination = '{CELERY}' || task.queue
          AND e.status IN ('NEW', 'RETRYING') AND e.ordering_key IS NULL
          AND coalesce(e.next_retry_at, '-infinity') <= (SELECT at FROM clock)
          AND greatest(e.created_at, e.next_retry_at) <= (SELECT at FROM clock) - make_interval(secs => :grace))"""
_COLUMNS: Final = """id, queue, priority, status, next_retry_at, created_at, updated_at, limited_at,
               coalesce(last_wakeup_at, created_at) AS last_wakeup_at"""
HORIZON: Final = """
    LEFT JOIN ledger.wakeup_horizon horizon ON horizon.queue = task.queue AND horizon.priority = task.priority"""

# kinds: the pairs (queue, type) of open tasks. A task of a paused queue is woken when the queue is resumed.
WAITING_KINDS: Final = sql(f"WITH RECURSIVE {KINDS} SELECT queue, type FROM kind WHERE NOT {IS_PAUSED}")
# overdue: the next page of due tasks of one queue and type, without those that have a partition key. The last two
# columns are the place of the task in the index, and whether it is overdue.
OVERDUE: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at)
    SELECT task.id, task.queue, task.last_wakeup_at, horizon.passed_wakeup_at, (SELECT at FROM clock),
           CAST(task.place AS text) AS place, {IS_OVERDUE} AS is_overdue
    FROM (
        SELECT {_COLUMNS}, {DUE_AT} AS place FROM ledger.ingest_task
        WHERE queue = :queue AND type = :type AND {OPEN} AND {DUE_AT} <= (SELECT at FROM clock)
          AND ({DUE_AT}, id) > (CAST(:place AS timestamptz), CAST(:id AS uuid))
        ORDER BY {DUE_AT}, id LIMIT :most) AS task {HORIZON}
    ORDER BY task.place, task.id
""")
# overdue_keyed: the first task of each of the next partition keys after `:after`. The last two columns are the key and
# whether the task is overdue; a key whose tasks are all skipped has a row, too.
OVERDUE_KEYED: Final = sql(f"""
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
            SELECT {_COLUMNS} FROM ledger.ingest_task WHERE partition_key = key.partition_key AND {BLOCKS}
            ORDER BY key_seq LIMIT 1) AS task ON true)
    SELECT task.id, task.queue, task.last_wakeup_at, horizon.passed_wakeup_at, (SELECT at FROM clock),
           task.partition_key, {OPEN} AND NOT task.{IS_PAUSED} AND limited_at IS NULL
           AND {TIME} <= (SELECT at FROM clock) AND {IS_OVERDUE}
    FROM head AS task {HORIZON} ORDER BY task.partition_key
""")


# wake_page: QUEUED|RETRYING → unchanged, with a new wake-up, for due tasks whose wake-up was lost. The time of this
# wake-up is not written into the tasks, which would cost more than all the rest: tasks of the first page have it,
# and a task of a later page that is still waiting after the tasks before it is checked like any other.
WAKE_PAGE: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    page AS MATERIALIZED (
        SELECT id, type, queue, priority, isolated, {DUE_AT} AS place, coalesce(last_wakeup_at, created_at) AS woken_at
        FROM ledger.ingest_task
        WHERE queue = :queue AND type = :type AND {OPEN} AND {DUE_AT} <= (SELECT at FROM clock)
          AND ({DUE_AT}, id) > (CAST(:place AS timestamptz), CAST(:id AS uuid))
        ORDER BY {DUE_AT}, id LIMIT :most),
    waiting AS MATERIALIZED (
        SELECT id, type, queue, priority, isolated, CAST(NULL AS timestamptz) AS due_at FROM page
        WHERE woken_at < :lost_at),
    {wakeups.insert_wakeups("waiting")}
    SELECT (SELECT count(*) FROM page) AS seen, (SELECT count(*) FROM waiting) AS woken, ours,
           CAST(last.place AS text), last.id
    FROM wakeups LEFT JOIN (SELECT place, id FROM page ORDER BY place DESC, id DESC LIMIT 1) AS last ON true
""")


@dataclass(frozen=True, slots=True)
class OverdueTask:
    """A task whose wake-up may be lost."""

    id: uuid.UUID
    queue: str
    last_wakeup_at: datetime
    passed_wakeup_at: datetime | None
    observed_at: datetime

    @property
    def was_overtaken(self) -> bool:
        """True if a task that was woken later was claimed more than a grace ago."""
        return self.passed_wakeup_at is not None and self.last_wakeup_at < self.passed_wakeup_at


def repair(engine: Engine, settings: Settings, *, depths: Depths, lost: Lost | None = None) -> int:
    """Send lost wake-ups again; return the number of tasks.

    For each queue and type, the first page of due tasks is checked. If all overdue tasks of a page have lost their
    wake-up, the next page follows, until the budget is used up. After a full page of them, all tasks that were woken
    before the first look are woken again. The broker is asked for its queue's length once, and only if a task is
    overdue: later, the queue contains the wake-ups that we sent. `lost` replaces that decision for Kafka, which does
    not hand out messages in one order.
    """
    grace = settings.ingest_wakeup_grace_ms / 1000
    values = {"grace": grace, "most": PAGE}
    give_up_at = time.monotonic() + BUDGET_SECONDS
    remembered = QueueDepths(depths)

    def choose(overdue: Sequence[OverdueTask]) -> Sequence[OverdueTask]:
        return lost(overdue, settings) if lost and overdue else remembered.choose(overdue)

    with Session(engine) as db:
        db.execute(RECORD_PROGRESS, {"grace": grace})
        kinds = db.execute(WAITING_KINDS).all()
        keyed = _overdue_keyed(db, values)
        db.commit()
    woken = _wake(engine, choose(keyed))
    for queue, type in kinds:
        place, id_ = "-infinity", uuid.UUID(int=0)
        while time.monotonic() < give_up_at:
            with engine.begin() as connection:
                page = connection.execute(OVERDUE, {**values, "queue": queue, "type": type, "place": place, "id": id_})
                rows = page.all()
            tasks = [OverdueTask(*row[:5]) for row in rows]
            overdue = [task for task, row in zip(tasks, rows, strict=True) if row.is_overdue]
            chosen = choose(overdue)
            woken += _wake(engine, chosen)
            if len(rows) < PAGE or not chosen or len(chosen) < len(overdue):
                break
            place, id_ = rows[-1].place, rows[-1].id
            if len(chosen) == PAGE and remembered.is_empty(queue):
                start = {"queue": queue, "type": type, "place": place, "id": id_, "lost_at": tasks[0].observed_at}
                woken += _wake_rest(engine, start, give_up_at)
                break
    return woken


def _wake_rest(engine: Engine, start: Mapping[str, Any], give_up_at: float) -> int:
    """Wake all further due tasks of a queue and type that were last woken before `lost_at`."""
    values, woken = {**start, "most": REST_PAGE}, 0
    while time.monotonic() < give_up_at:
        with Session(engine) as db:
            row = db.execute(WAKE_PAGE, {**values, **wakeups.wakeup_values(db, {start["queue"]})}).one()
            wakeups.publish_after_commit(db, row.ours)
            db.commit()
        woken += row.woken
        if row.seen < REST_PAGE:
            break
        values |= {"place": row.place, "id": row.id}
    return woken


def _wake(engine: Engine, tasks: Sequence[OverdueTask]) -> int:
    if not tasks:
        return 0
    with Session(engine) as db:
        woken = wakeups.wake_again(db, [task.id for task in tasks], queues={task.queue for task in tasks})
        db.commit()
    return woken.tasks


def _overdue_keyed(db: Session, values: Mapping[str, Any]) -> list[OverdueTask]:
    """Look at the next `most` partition keys; after the last key, start again with the first."""
    rows = db.execute(OVERDUE_KEYED, {**values, **_scan, "skipping": skipping(handlers())}).all()
    _scan["after"] = rows[-1].partition_key if len(rows) >= values["most"] else ""
    return [OverdueTask(*row[:5]) for row in rows if row[-1]]


_scan: Final = {"after": ""}  # the last partition key that this process has looked at


class QueueDepths:
    """How many messages waited in each queue when it was first asked for."""

    def __init__(self, depths: Depths) -> None:
        self._ask = depths
        self._known: dict[str, int] = {}

    def is_empty(self, queue: str) -> bool:
        """Return True if the broker was asked for this queue and had no messages in it."""
        return self._known.get(queue) == 0

    def choose(self, overdue: Sequence[OverdueTask]) -> list[OverdueTask]:
        """Return the tasks whose wake-up is lost."""
        if unknown := {task.queue for task in overdue} - self._known.keys():
            self._known |= self._ask(unknown)
        return [task for task in overdue if not self._known[task.queue] or task.was_overtaken]
