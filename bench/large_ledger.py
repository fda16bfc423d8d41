"""Fill a ledger with as many rows as a busy installation has, by SQL.

Three quarters of the tasks are finished, a quarter is due, some are dead; events wait in the outbox; and the tally has
a history of each kind, and the rows of a busy minute that were not folded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from models.engine import engine
from models.sql import sql
from tally.append import kind_of
from tally.fold import fold

QUEUES: Final = 3
TYPES: Final = 7
RESULTS: Final = 3
# fill: `:count` tasks of several types and queues. Every fourth is due, one in forty of the others is dead.
FILL: Final = sql("""
    INSERT INTO ledger.ingest_task (id, type, payload, queue, status, attempt_count, last_error, error_message,
                                    error_code, error_fingerprint, created_at, updated_at, finished_at, last_wakeup_at)
    SELECT CASE WHEN n % 10 = 0 THEN gen_random_uuid()  -- of a task with a key; the others are in the order of time
                ELSE CAST('0190' || lpad(to_hex(n), 8, '0') || '7' || right(gen_random_uuid()::text, 21) AS uuid) END,
           'type.' || n % :types, '{}', 'queue-' || n % :queues, status,
           CASE WHEN status = 'DEAD' THEN 10 ELSE 0 END, error, error, error,
           ledger.ingest_error_fingerprint(error, error), at, at,
           CASE WHEN status <> 'QUEUED' THEN at END, at
    FROM generate_series(1, :count) AS n CROSS JOIN LATERAL (
        SELECT CASE WHEN n % 4 = 0 THEN 'QUEUED' WHEN n % 40 = 1 THEN 'DEAD' ELSE 'SUCCEEDED' END AS status,
               CASE WHEN n % 4 <> 0 AND n % 40 = 1 THEN 'failed' END AS error,
               ledger.ledger_now() - make_interval(secs => (:count - n) * 0.05) AS at) AS of_task
""")
EVENTS: Final = sql("""
    INSERT INTO ledger.outbox_event (destination, payload)
    SELECT 'celery:queue-' || n % :queues, '{"type": "type.1", "ids": []}' FROM generate_series(1, :count) AS n
""")
TALLY: Final = sql(f"""
    INSERT INTO ledger.task_tally (minute, subject, queue, type, result, count, run_seconds, run, wait_seconds, wait,
                                   kind)
    SELECT date_trunc('minute', ledger.ledger_now()), subject, queue, type, result, 1, 0.002, '{{0,1}}', 0.02,
           '{{0,0,0,0,1}}', {kind_of()}
    FROM generate_series(1, :count) AS n CROSS JOIN LATERAL (
        SELECT 'task' AS subject, 'queue-' || n % :queues AS queue, 'type.' || n % :types AS type,
               (ARRAY['succeeded', 'retry', 'dead'])[1 + n / (:queues * :types) % 3] AS result) AS counted
""")


def fill(*, tasks: int, events: int, tally: int, say: Callable[[str], None]) -> None:
    """Insert the rows into the ledger of this process, and vacuum the tables."""
    say(f"Inserting {tasks:,} tasks, {events:,} events and {tally:,} rows of the tally …")
    kinds = {"queues": QUEUES, "types": TYPES}
    with engine().begin() as connection:
        connection.execute(FILL, {"count": tasks, **kinds})
        connection.execute(EVENTS, {"count": events, "queues": QUEUES})
        connection.execute(TALLY, {"count": RESULTS * QUEUES * TYPES, **kinds})
    fold(engine(), budget_seconds=60)
    with engine().begin() as connection:
        connection.execute(TALLY, {"count": tally, **kinds})
    with engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in ("ingest_task", "outbox_event", "task_tally"):
            connection.execute(sql(f"VACUUM ANALYZE ledger.{table}"))
