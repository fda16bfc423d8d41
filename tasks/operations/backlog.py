"""Watch the backlog of each queue: raise an alert above BACKLOG_ALERT_THRESHOLD, and act by BACKLOG_POLICY.

    alert    log it, show it, and tell the destination BACKLOG_NOTIFY
    refuse   new tasks for that queue are refused, too (`tasks/submission/closed_queues.py`)
    scale    each prefork worker of that queue gets BACKLOG_MAX_PROCESSES processes, too (`tasks/operations/scale.py`)

The alert ends, and with it what the policy did, when less than 80 % of the threshold waits; between the two numbers
nothing changes, so that a queue near the threshold does not change its state all the time. A row of `queue_alert` is
the alert: reclaim's tick writes it, so it survives restarts, and each change is reported once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Engine

import outbox
from models.sql import sql
from outbox.lease import Db
from settings import Settings
from tasks.core.due_times import DUE_AT, KINDS, OPEN, TIME
from tasks.core.registered_types import registered_queues

logger = logging.getLogger(__name__)

CLEAR_BELOW: Final = 0.8  # of the threshold

_OF_KIND: Final = (
    f"SELECT FROM ledger.ingest_task WHERE queue = kind.queue AND type = kind.type AND {OPEN} AND {DUE_AT}"
)
# waiting: the due tasks of each queue. Counting stops above the threshold, so a million cost no more than that.
WAITING: Final = sql(f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at), {KINDS}
    SELECT queue, least(sum(due), :most) FROM kind CROSS JOIN LATERAL (
        SELECT count(*) AS due FROM (
            ({_OF_KIND} <= (SELECT at FROM clock) LIMIT :most)
            UNION ALL ({_OF_KIND} = 'infinity' AND {TIME} <= (SELECT at FROM clock) LIMIT :most)) AS parts) AS found
    GROUP BY queue
""")
ALERTS: Final = sql("SELECT queue, waiting, refuses, processes, created_at FROM ledger.queue_alert ORDER BY queue")
# raise: → alert. Returns nothing if another process was first.
RAISE: Final = sql("""
    INSERT INTO ledger.queue_alert (queue, waiting, refuses, processes, created_at)
    VALUES (:queue, :waiting, :refuses, :processes, (SELECT ledger.ledger_now()))
    ON CONFLICT (queue) DO NOTHING RETURNING created_at
""")
# update: alert → alert. The policy may have changed since.
UPDATE: Final = sql("""
    UPDATE ledger.queue_alert SET waiting = :waiting, refuses = :refuses, processes = :processes
    WHERE queue = :queue
      AND (waiting, refuses, processes) IS DISTINCT FROM (:waiting, :refuses, CAST(:processes AS integer))
""")
# clear: alert → none.
CLEAR: Final = sql("DELETE FROM ledger.queue_alert WHERE queue = :queue RETURNING (SELECT ledger.ledger_now())")


@dataclass(frozen=True, slots=True)
class Alert:
    """Too many tasks wait in a queue."""

    queue: str
    waiting: int
    refuses: bool
    processes: int | None
    since: datetime


def check_backlog(engine: Engine, settings: Settings) -> int:
    """Raise and clear alerts; return how many changed."""
    threshold, changed = settings.backlog_alert_threshold, 0
    with outbox.begin(engine) as db:
        counted = {queue: int(count) for queue, count in db.execute(WAITING, {"most": threshold + 1})}
        alerts = read_alerts(db)
        for queue in sorted(counted.keys() | alerts.keys()):
            waiting = counted.get(queue, 0)
            values = {"queue": queue, "waiting": waiting, **_policy(settings)}
            if queue not in alerts:
                raised_at = db.execute(RAISE, values).scalar() if waiting > threshold else None
                changed += _report(db, settings, "raised", values, raised_at)
            elif waiting < threshold * CLEAR_BELOW:
                changed += _report(db, settings, "cleared", values, db.execute(CLEAR, {"queue": queue}).scalar())
            else:
                db.execute(UPDATE, values)
    return changed


def read_alerts(connection: Connection) -> dict[str, Alert]:
    return {row.queue: Alert(*row) for row in connection.execute(ALERTS)}


def read_backlog_alerts(connection: Connection) -> dict[str, bool]:
    """Return for each queue whether there is an alert: the metric `celeriac_backlog_alert`."""
    alerts = read_alerts(connection)
    return {queue: queue in alerts for queue in sorted({*registered_queues(connection), *alerts})}


def _policy(settings: Settings) -> dict[str, Any]:
    scales = settings.backlog_policy == "scale"
    return {
        "refuses": settings.backlog_policy == "refuse",
        "processes": settings.backlog_max_processes if scales else None,
    }


def _report(db: Db, settings: Settings, state: str, values: dict[str, Any], at: datetime | None) -> int:
    """Log a change and notify the destination, if there was a change. Return the number of changes."""
    if at is None:
        return 0
    queue, waiting, threshold = values["queue"], values["waiting"], settings.backlog_alert_threshold
    how_many = f"more than {threshold:,}" if waiting > threshold else f"{waiting:,}"
    message = "The backlog of the queue %s: %s tasks wait (threshold %d, policy %s); alert %s."
    event = {"event": "backlog_alert_raised" if state == "raised" else "backlog_alert_cleared"}
    details = {**event, "queue": queue, "waiting": waiting, "threshold": threshold}
    logger.warning(message, queue, how_many, threshold, settings.backlog_policy, state, extra=details)
    if settings.backlog_notify:
        payload = {**details, "policy": settings.backlog_policy, "at": at.isoformat()}
        outbox.add(db, settings.backlog_notify, payload)
    return 1
