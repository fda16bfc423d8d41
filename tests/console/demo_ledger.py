"""A ledger as of an installation that has worked for a month, for pictures and for tests that need one."""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Connection

from models.sql import sql
from tally.append import Sums
from tally.histograms import as_array
from tasks.core.tick_intervals import intervals
from tasks.recovery.tick_rows import BEAT

# Queue, type, and how many tasks of it are QUEUED, RUNNING, RETRYING, DEAD and SUCCEEDED.
KINDS: Final = (
    ("ingest", "invoice.import", 18, 2, 3, 0, 4210),
    ("ingest", "document.ingest", 4, 1, 0, 1, 932),
    ("mail", "mail.send", 41, 4, 9, 0, 2874),
    ("crm", "crm.sync", 6, 2, 14, 6, 1103),
    ("reports", "report.nightly", 0, 1, 0, 0, 60),
)
WORKERS: Final = (("web-1:4127-worker", ["ingest", "mail"], 8), ("web-2:3981-worker", ["crm", "ingest", "reports"], 4))
DESTINATIONS: Final = (
    ("orders", 12, "14 seconds"),
    ("billing-webhook", 3, "2 seconds"),
    ("celery:mail", 1, "0 seconds"),
)
# What a span's steps look like: how long, how many, and about how many tasks end in each.
SPANS: Final = (
    ("minute", timedelta(minutes=1), 15, 340),
    ("hour", timedelta(hours=1), 24, 19_000),
    ("day", timedelta(days=1), 30, 410_000),
)

TASKS: Final = sql("""
    INSERT INTO ledger.ingest_task (id, type, queue, payload, status, attempt_count, last_error, error_message,
        error_code, error_fingerprint, next_retry_at, lease_token, created_at, updated_at, finished_at)
    SELECT gen_random_uuid(), :type, :queue, '{}', :status, CASE WHEN :failed THEN 2 ELSE 0 END,
           CASE WHEN :failed THEN 'Traceback' END, CASE WHEN :failed THEN 'The server answered 503.' END,
           CASE WHEN :failed THEN 'handler_error' END,
           CASE WHEN :failed THEN ledger.ingest_error_fingerprint('handler_error', 'The server answered 503.') END,
           CASE WHEN :status = 'RETRYING' THEN at + make_interval(secs => 20 + n) END,
           CASE WHEN :status = 'RUNNING' THEN CAST(:token AS uuid) END,
           at - make_interval(secs => n * 0.2), at - make_interval(secs => n * 0.2),
           CASE WHEN :status IN ('SUCCEEDED', 'DEAD', 'DISCARDED') THEN at - make_interval(secs => n * 0.2) END
    FROM generate_series(1, :count) AS n CROSS JOIN (SELECT ledger.ledger_now() AS at) AS clock
""")
LEASE: Final = sql("""
    INSERT INTO ledger.task_lease (token, holder, lease_until, task_ids, type, queue, priority)
    SELECT CAST(:token AS uuid), :holder, ledger.ledger_now() + interval '1 hour', array_agg(id), :type, :queue, 5
    FROM ledger.ingest_task WHERE lease_token = CAST(:token AS uuid)
""")
EVENTS: Final = sql("""
    INSERT INTO ledger.outbox_event (destination, payload, created_at)
    SELECT :destination, '{}', ledger.ledger_now() - CAST(:age AS interval) FROM generate_series(1, :count)
""")
WORKER: Final = sql("""
    INSERT INTO ledger.task_worker (worker, queues, types, processes, version, started_at, seen_at)
    VALUES (:worker, CAST(:queues AS text[]), CAST(:types AS text[]), :processes, 'shop 4.2',
            ledger.ledger_now() - interval '76 hours', ledger.ledger_now() - interval '3 seconds')
    ON CONFLICT (worker) DO UPDATE SET seen_at = excluded.seen_at
""")
TICK: Final = sql("""
    INSERT INTO ledger.tick (name, holder, started_at, finished_at)
    VALUES (:name, 'web-1:4130', ledger.ledger_now(), ledger.ledger_now() - make_interval(secs => :age))
    ON CONFLICT (name) DO UPDATE SET finished_at = excluded.finished_at
""")
PERIOD: Final = sql("""
    INSERT INTO ledger.tally_period (span, start, subject, queue, type, result, count, run_seconds, run, wait_seconds,
                                     wait)
    SELECT :span, date_trunc(:span, ledger.ledger_now(), 'UTC') - CAST(:ago AS interval), :subject, :queue, 'demo',
           :result, :count, 1, CAST(:run AS bigint[]), 1, CAST(:wait AS bigint[])
""")


def fill(connection: Connection) -> None:
    """Fill an empty ledger."""
    for queue, type_, *counts in KINDS:
        for status, count in zip(("QUEUED", "RUNNING", "RETRYING", "DEAD", "SUCCEEDED"), counts, strict=True):
            add_tasks(connection, queue, type_, status, count)
    for destination, count, age in DESTINATIONS:
        connection.execute(EVENTS, {"destination": destination, "count": count, "age": age})
    for row in _periods(random.Random(7)):  # the same picture each time
        connection.execute(PERIOD, row)
    give_signs_of_life(connection)


def add_tasks(connection: Connection, queue: str, type_: str, status: str, count: int) -> None:
    if not count:
        return
    values: dict[str, Any] = {
        "queue": queue,
        "type": type_,
        "status": status,
        "count": count,
        "token": str(uuid.uuid4()),
    }
    connection.execute(TASKS, {**values, "failed": status in ("RETRYING", "DEAD")})
    if status == "RUNNING":
        holder = next((name for name, queues, _ in WORKERS if queue in queues), WORKERS[0][0])
        connection.execute(LEASE, values | {"holder": holder})


def give_signs_of_life(connection: Connection) -> None:
    """Let beat, its ticks and the workers be seen just now."""
    for worker, queues, processes in WORKERS:
        types = [*(type_ for _, type_, *_ in KINDS), "workflow.execute"]
        connection.execute(WORKER, {"worker": worker, "queues": queues, "types": types, "processes": processes})
    for number, name in enumerate((BEAT, *intervals())):
        connection.execute(TICK, {"name": name, "age": 0.2 + 0.6 * number})


def _periods(chance: random.Random) -> Iterator[dict[str, Any]]:
    for span, length, count, usual in SPANS:
        for back in range(count):
            share = 0.4 if back == 0 else 1.0
            wave = (0.75 + 0.25 * math.sin(back / 2.2)) * chance.uniform(0.85, 1.1) * share
            slow = 6.0 if back in (4, 5) else 1.0
            results = {
                "succeeded": wave * usual,
                "retry": wave * usual * 0.03 * slow,
                "dead": 0.4 * chance.random() * slow,
            }
            for result, about in results.items():
                total = round(about)
                yield {
                    **{"span": span, "ago": back * length, "subject": "task", "queue": "ingest", "result": result},
                    **{
                        "count": total,
                        "run": _histogram(chance, total, 0.03 * slow),
                        "wait": _histogram(chance, total, 0.008 * slow),
                    },
                }
            if span == "minute":
                for destination, sent in (("celery:mail", 0.5), ("orders", 0.12), ("billing-webhook", 0.05)):
                    yield {
                        **{"span": span, "ago": back * length, "subject": "publish", "queue": destination},
                        **{"result": "success", "count": round(wave * usual * sent), "run": "{}", "wait": "{}"},
                    }


def _histogram(chance: random.Random, total: int, median: float) -> str:
    """Return the histogram of so many times. A large number is made of a sample."""
    sample = min(total, 300)
    counts = Sums.of(sample, [chance.lognormvariate(math.log(median), 1.1) for _ in range(sample)]).run
    return as_array([each * total // sample for each in counts] if sample else [])
