"""The upper limit: our own claim and settle statements in bare psycopg2, without Celery, session or handler.

`ours.py` submits the tasks. Each process takes every second batch; `width` is the batch size. `work` inserts the
effects of a batch with one statement, as a batch handler can; `work_one_by_one` sends an INSERT for each task. `insert`
is the upper limit of submitting: the rows that `submit_many` writes, as bare multi-row INSERTs.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import psycopg2
from psycopg2.extensions import new_array_type, register_type
from psycopg2.extras import execute_values, register_default_jsonb

from bench.peers.effect import INSERT, PROCESSES, VALUE, database_url, pass_gate, run_command
from models.driver_values import array, array_of_ids, parse_json
from models.sql import sql
from tally.append import Sums
from tasks.core.outcomes import Succeeded
from tasks.core.task_ids import fresh_id
from tasks.execution.claim_statements import CLAIM
from tasks.execution.settle_statements import settling

UUIDS: Final = new_array_type((2951,), "uuid[]", psycopg2.STRING)  # psycopg2 does not read uuid[] as a list by itself
CHUNK: Final = 1000
WAKEUP: Final = 100
LEASE_SECONDS: Final = 60
TYPES: Final = ("bench.many", "bench.task")
MANY_ROWS: Final = "INSERT INTO bench_sink (n, value) SELECT n, %s FROM unnest(%s) AS n"
TASKS: Final = sql("""
    INSERT INTO ledger.ingest_task (id, type, payload, context, queue, priority, max_attempts, last_wakeup_at,
                                    created_at, updated_at)
    VALUES %s
""")
TRANSITIONS: Final = sql("INSERT INTO ledger.ingest_task_transition (task_id, to_status, actor, created_at) VALUES %s")
WAKEUPS: Final = sql("""
    INSERT INTO ledger.outbox_event (destination, payload, headers, created_at, locked_by, locked_at, lease_token,
                                     lease_until)
    VALUES %s
""")


def work(width: int, place: int) -> None:
    _work(width, place, lambda cursor, numbers: cursor.execute(MANY_ROWS, (VALUE, numbers)))


def work_one_by_one(width: int, place: int) -> None:
    def insert_each(cursor: Any, numbers: Sequence[int]) -> None:
        for n in numbers:
            cursor.execute(INSERT, (n, VALUE))

    _work(width, place, insert_each)


def _work(width: int, place: int, insert: Callable[[Any, Sequence[int]], object]) -> None:
    register_type(UUIDS)
    register_default_jsonb(globally=True, loads=parse_json)  # as Celeriac does
    with psycopg2.connect(database_url()) as connection, connection.cursor() as cursor:
        for name, statement in (("claim", CLAIM), ("succeed", settling(Succeeded))):
            cursor.execute(statement.prepare_text(name))
        claim, succeed = CLAIM.execute_text("claim"), settling(Succeeded).execute_text("succeed")
        cursor.execute(sql("SELECT id FROM ledger.ingest_task ORDER BY created_at, id").text)
        ids = [str(id_) for (id_,) in cursor.fetchall()]
        connection.commit()
        pass_gate()
        for start in range(place * width, len(ids), PROCESSES * width):
            token = str(uuid.uuid4())
            cursor.execute(claim, claiming(ids[start : start + width], token))
            rows = [row for row in cursor.fetchall() if row[-1] == "RUN"]
            connection.commit()
            insert(cursor, [row[2]["n"] for row in rows])
            cursor.execute(succeed, succeeding([row[0] for row in rows], token))
            answer = cursor.fetchone()
            assert answer is not None
            assert answer[0] is None  # None means all of them
            connection.commit()
    time.sleep(3600)  # until it is ended, as any worker is


def claiming(ids: Sequence[str], token: str) -> dict[str, Any]:
    """Return the parameters of CLAIM."""
    known = {
        "types": array(TYPES),
        "batches": array([len(ids)] * len(TYPES)),
        "relaxed": array([True] * len(TYPES)),
        "limited": array([False] * len(TYPES)),
    }
    return {**known, "ids": array_of_ids(ids), "token": token, "holder": "raw", "lease_seconds": LEASE_SECONDS}


def succeeding(ids: Sequence[str], token: str) -> dict[str, Any]:
    """Return the parameters of SUCCEED."""
    return {
        "id": array_of_ids(ids),
        "result": array([None] * len(ids)),
        "token": token,
        "actor": "raw",
        "is_last": True,
        **Sums.of(len(ids)).values(),
    }


def insert(count: int) -> dict[str, float]:
    """Insert in transactions of a thousand tasks. The values are prepared before the clock starts."""
    chunks = list(_chunks(count))
    with psycopg2.connect(database_url()) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        connection.commit()
        began_at = time.monotonic()
        for tasks, transitions, wakeups in chunks:
            for statement, rows in ((TASKS, tasks), (TRANSITIONS, transitions), (WAKEUPS, wakeups)):
                execute_values(cursor, statement.text, rows, page_size=CHUNK)
            connection.commit()
        return {"seconds": time.monotonic() - began_at}


def _chunks(count: int) -> Iterator[tuple[list[Any], list[Any], list[Any]]]:
    at = "2026-01-01 00:00:00+00"
    token = str(uuid.uuid4())
    for first in range(0, count, CHUNK):
        ids = [str(fresh_id()) for _ in range(min(CHUNK, count - first))]
        tasks = [
            (id_, "bench.task", f'{{"n":{first + place}}}', "{}", "ingest", 5, 10, at, at, at)
            for place, id_ in enumerate(ids)
        ]
        yield tasks, [(id_, "QUEUED", "raw", at) for id_ in ids], [_wakeup(each, at, token) for each in _wakeups(ids)]


def _wakeups(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), WAKEUP):
        yield ids[start : start + WAKEUP]


def _wakeup(ids: Sequence[str], at: str, token: str) -> tuple[str, ...]:
    listed = ", ".join(f'"{id_}"' for id_ in ids)
    payload = f'{{"type": "bench.task", "ids": [{listed}], "batch": {WAKEUP}}}'
    return ("celery:ingest", payload, '{"priority": 5}', at, "raw", at, token, at)


if __name__ == "__main__":
    run_command(work=work, work_one_by_one=work_one_by_one, insert=insert)
