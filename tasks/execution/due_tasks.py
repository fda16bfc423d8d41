"""Find other due tasks of the queue and type that this process is running, for the places that it has free.

Wake-ups name tasks, but a process that is busy takes no message. So it looks into the ledger itself. The claim decides
what it gets of the tasks that are found here.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Engine

from models.driver_values import array_of_ids
from models.engine import autocommit
from models.ledger_outage import wait_for_ledger
from models.sql import sql
from tasks.core.due_times import DUE_AT, IS_PAUSED, KINDS, NOT_EXPIRED, OPEN
from tasks.core.registry import handlers
from tasks.execution.claim import Claim

FAIR_SECONDS: Final = 5.0
# Tasks of another known type have been due in the queue for some seconds, and those of this type are to give way.
_GIVES_WAY: Final = f"""(:gives_way AND EXISTS (
          SELECT FROM kind
          WHERE kind.queue = :queue AND kind.type <> :type AND kind.type = ANY(CAST(:known AS text[])) AND EXISTS (
              SELECT FROM ledger.ingest_task AS other WHERE other.queue = kind.queue AND other.type = kind.type
              AND {OPEN} AND {DUE_AT} <= (SELECT at - make_interval(secs => :seconds) FROM clock))))"""
# due_of_kind: the tasks of one queue and type that have been due for longest. Some may be locked by other claims.
DUE_OF_KIND: Final = sql(f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at), {KINDS}
    SELECT id FROM ledger.ingest_task
    WHERE queue = :queue AND type = :type AND {OPEN} AND NOT isolated
      AND {DUE_AT} <= (SELECT at FROM clock) AND {NOT_EXPIRED} AND NOT {IS_PAUSED}
      AND id <> ALL(CAST(:but AS uuid[])) AND NOT {_GIVES_WAY}
    ORDER BY {DUE_AT}, id LIMIT :most
""")
# woken_of_kind: the next limits of a type, and of each the first task that waits for it, if it has been woken. Where
# one may start, the claim adds others that wait for the same limit.
_WAITING: Final = f"type = :type AND limited_at IS NOT NULL AND {OPEN}"
WOKEN_OF_KIND: Final = sql(f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at), {KINDS},
    key (limit_key, number) AS (
        (SELECT limit_key, 1 FROM ledger.ingest_task
         WHERE {_WAITING} AND (CAST(:after AS text) IS NULL OR limit_key > :after) ORDER BY limit_key LIMIT 1)
        UNION ALL
        SELECT next.limit_key, number + 1 FROM key CROSS JOIN LATERAL (
            SELECT limit_key FROM ledger.ingest_task WHERE {_WAITING} AND limit_key > key.limit_key
            ORDER BY limit_key LIMIT 1) AS next WHERE number < :most)
    SELECT key.limit_key, CASE WHEN queue = :queue AND NOT isolated AND partition_key IS NULL AND {NOT_EXPIRED}
                                AND last_wakeup_at <= (SELECT at FROM clock) AND NOT {_GIVES_WAY} THEN id END
    FROM key LEFT JOIN LATERAL (
        SELECT * FROM ledger.ingest_task AS waiting
        WHERE {_WAITING} AND waiting.limit_key = key.limit_key AND NOT {IS_PAUSED}
        ORDER BY priority DESC, limited_at, id LIMIT 1) AS task ON true
    ORDER BY key.limit_key
""")
_seen_last: Final[dict[str, str]] = {}  # by type: the last limit of the previous look; the next one continues there


def find_due(
    engine: Engine, before: Claim, began_at: float, *, most: int, but: Sequence[uuid.UUID] = ()
) -> list[uuid.UUID]:
    """Return other due tasks of the same queue and type, at most so many, `but` not these.

    There are none if the process has run this type for some seconds and others wait in the queue.
    """
    rows = _ask(engine, DUE_OF_KIND, before, began_at, most=most, but=array_of_ids(but))
    return [id_ for (id_,) in rows]


def find_woken(engine: Engine, before: Claim, began_at: float, *, most: int) -> list[uuid.UUID]:
    """Return tasks of the same queue and type that have waited for a limit and may start now, one for each limit.

    Each call looks at so many limits, at most. The next one continues, and starts again after the last limit.
    """
    type_ = before.tasks[0].type
    rows = _ask(engine, WOKEN_OF_KIND, before, began_at, most=most, after=_seen_last.pop(type_, None))
    if len(rows) == most:
        _seen_last[type_] = rows[-1][0]
    return [id_ for _, id_ in rows if id_ is not None]


def _ask(engine: Engine, statement: Any, before: Claim, began_at: float, **values: Any) -> Sequence[Any]:
    task = before.tasks[0]
    values |= {
        "queue": task.queue,
        "type": task.type,
        "gives_way": time.monotonic() - began_at > FAIR_SECONDS,
        "seconds": FAIR_SECONDS,
        "known": list(handlers()),
    }

    def find() -> Sequence[Any]:
        with autocommit(engine) as connection:
            return connection.execute(statement, values).all()

    return wait_for_ledger(find)
