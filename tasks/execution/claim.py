"""The guard: which of the delivered tasks may run, and with what right. Every delivery is presumed a duplicate.

Authority. A task belongs to whoever wrote the last `lease_token` into it; the lease is one row of `task_lease` for the
whole batch (P2). The claim is committed before a handler starts. `heartbeat.py` renews the lease while the batch runs;
`settle.py` names the token in every statement; when the lease is lost, reclaim gives the tasks to others, and whatever
the old holder still wants to write is refused and audited.

    QUEUED | RETRYING, due ──claim──► RUNNING, leased ──settle──► SUCCEEDED | RETRYING | DEAD | DISCARDED
                                                     └─release─► QUEUED

A delivered id that is not claimed is SKIPPED (running, final, taken by somebody else at this moment, or unknown),
NOT_DUE, or UNHANDLED (no handler here, as in a rolling deploy: it is woken again later). Own ids come first;
what remains of the batch is filled with other due tasks of the same queue and type (P7). A claim holds one kind (P4),
and a task that must run alone (P5) is a kind of its own: `left` are the ids for the next claim. Tasks with a partition
key are KEYED: `tasks/execution/claim_partitioned.py` claims those whose turn it is.

For transactional handlers the claim is committed asynchronously (P15): if the server loses it in a crash, their effects
are lost with it, and the task is claimed again. A claim of any other handler must survive, and is waited for; so is one
that is `durable`, after which nothing but the ledger will know the task.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection

from models.driver_values import array, array_of_ids
from models.errors import Misuse
from models.prepared_statements import Prepared
from models.sql import sql
from tasks.core.batch_size import batch_to_claim
from tasks.core.due_times import DUE_AT, OPEN, TIME
from tasks.core.registry import Handler
from tasks.core.task import Task

DUE: Final = f"{TIME} <= (SELECT at FROM clock)"


def columns(content: str = "payload, nullif(context, '{}') AS context") -> str:
    """What a task is to its handler, in the order of `Task`."""
    return f"""id, type, {content}, queue, priority, attempt_count, max_attempts, idempotency_key, next_retry_at,
                  created_at, partition_key, key_seq"""


_COUNT: Final = 13
# given: what a handler may have changed in its hands.
GIVEN: Final = sql("""
    SELECT id, payload, nullif(context, '{}') FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[]))
""")


def claim_statement(choose: str, *, verdict: str) -> Prepared:
    """QUEUED|RETRYING and due → RUNNING under a fresh lease, each with its transition; the others with a verdict.

    `choose` makes `kind` of `own`, then `mine` (own ids of that kind, at most a batch), and locks `held`.
    """
    return Prepared(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    given AS MATERIALIZED (
        SELECT id, min(place) AS place
        FROM unnest(CAST(:ids AS uuid[])) WITH ORDINALITY AS given(id, place) GROUP BY id),
    known AS MATERIALIZED (
        SELECT * FROM unnest(CAST(:types AS text[]), CAST(:batches AS integer[]), CAST(:relaxed AS boolean[]))
                      AS known(type, batch, relaxed)),
    own AS MATERIALIZED (
        SELECT id, place, type, queue, priority, isolated, last_wakeup_at, {OPEN} AS open, {DUE} AS due, known.batch,
               known.relaxed, partition_key, key_seq
        FROM given LEFT JOIN LATERAL (
            SELECT type, queue, priority, isolated, last_wakeup_at, status, next_retry_at, partition_key, key_seq
            FROM ledger.ingest_task WHERE id = given.id OFFSET 0) AS task ON true
        LEFT JOIN known USING (type)),
    {choose},
    relaxed AS MATERIALIZED (
        SELECT set_config('synchronous_commit', 'off', true) FROM kind WHERE relaxed),
    lease AS (
        INSERT INTO ledger.task_lease
            (token, holder, lease_until, task_ids, type, queue, priority, claimed_at, last_wakeup_at)
        SELECT CAST(:token AS uuid), CAST(:holder AS text), clock.at + make_interval(secs => :lease_seconds),
               array_agg(held.id), kind.type, kind.queue, kind.priority, clock.at,
               (SELECT max(last_wakeup_at) FROM mine)
        FROM held CROSS JOIN kind CROSS JOIN clock GROUP BY kind.type, kind.queue, kind.priority, clock.at),
    told AS (
        INSERT INTO ledger.ingest_task_transition (task_id, from_status, to_status, attempt_count, actor, created_at)
        SELECT id, status, 'RUNNING', attempt_count, CAST(:holder AS text), at FROM held CROSS JOIN clock),
    run AS (
        UPDATE ledger.ingest_task
        SET status = 'RUNNING', lease_token = CAST(:token AS uuid), updated_at = (SELECT at FROM clock)
        WHERE id = ANY(ARRAY(SELECT id FROM held))
        RETURNING {columns()})
    SELECT run.*, 'RUN' AS verdict FROM run LEFT JOIN relaxed ON true
    UNION ALL
    (SELECT own.id, own.type, NULL, NULL, own.queue, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
            CASE WHEN NOT coalesce(open, false) THEN 'SKIPPED' WHEN NOT due THEN 'NOT_DUE'
                 WHEN batch IS NULL THEN 'UNHANDLED' {verdict}
                 WHEN own.id IN (SELECT id FROM mine) THEN 'SKIPPED' ELSE 'LEFT' END
     FROM own WHERE own.id NOT IN (SELECT id FROM held) ORDER BY place)
    """)


# claim: own ids first, then others of their kind that are due, skipping what others are locking.
CLAIM: Final = claim_statement(
    f"""
    kind AS MATERIALIZED (
        SELECT type, queue, priority, isolated, CASE WHEN isolated THEN 1 ELSE batch END AS most, relaxed
        FROM own WHERE open AND due AND partition_key IS NULL AND batch IS NOT NULL
        ORDER BY isolated, place LIMIT 1),
    mine AS MATERIALIZED (
        SELECT own.id, own.last_wakeup_at FROM own JOIN kind USING (type, queue, priority, isolated)
        WHERE open AND due AND partition_key IS NULL ORDER BY place LIMIT (SELECT most FROM kind)),
    others AS MATERIALIZED (
        SELECT task.id FROM kind CROSS JOIN LATERAL (
            SELECT id FROM ledger.ingest_task
            WHERE queue = kind.queue AND type = kind.type AND {OPEN} AND NOT isolated
              AND {DUE_AT} <= (SELECT at FROM clock) AND id <> ALL(CAST(:ids AS uuid[]))
            ORDER BY {DUE_AT}, id
            LIMIT (SELECT kind.most - count(*) FROM mine) FOR NO KEY UPDATE SKIP LOCKED) AS task
        WHERE NOT kind.isolated AND (SELECT count(*) FROM mine) < kind.most),
    held AS MATERIALIZED (
        SELECT task.* FROM (SELECT id FROM mine UNION ALL SELECT id FROM others ORDER BY id) AS wanted
        CROSS JOIN LATERAL (
            SELECT id, status, attempt_count FROM ledger.ingest_task
            WHERE id = wanted.id AND {OPEN} AND {DUE} FOR NO KEY UPDATE SKIP LOCKED) AS task)""",
    verdict="WHEN partition_key IS NOT NULL THEN 'KEYED'",
)


@dataclass(frozen=True, slots=True)
class Claim:
    """What may run now, under one lease, and what became of the other ids."""

    token: uuid.UUID
    deadline: float  # of `time.monotonic()`, taken before the claim: nothing may be done in its name after that (P6)
    tasks: list[Task] = field(default_factory=list)
    skipped: list[uuid.UUID] = field(default_factory=list)
    not_due: list[uuid.UUID] = field(default_factory=list)
    unhandled: list[uuid.UUID] = field(default_factory=list)
    left: list[uuid.UUID] = field(default_factory=list)
    keyed: list[uuid.UUID] = field(default_factory=list)  # they wait for their turn, too
    next_in_line: list[uuid.UUID] = field(default_factory=list)  # whose turn comes when what runs now is done


def claim(
    connection: Connection,
    ids: Sequence[str | uuid.UUID],
    *,
    handlers: Mapping[str, Handler],
    holder: str,
    lease_seconds: float,
    token: uuid.UUID | None = None,
    statement: Prepared = CLAIM,
    durable: bool = False,
    commits: bool = True,
    batch_of: Callable[[Handler], int] = batch_to_claim,
    **more: Any,
) -> Claim:
    """Claim a batch and commit. `durable`: it is on the disk when this returns, whatever the handler.

    Whoever gives a fresh `token` knows what was claimed even if this never returns.

    `commits=False` is for a test that will roll back: nobody else sees the claim, so it keeps nobody away; and for one
    that knows its batch, whatever the pace of its handler, there is `batch_of`.
    """
    if commits and connection.in_transaction():
        raise Misuse("A claim commits, and this connection has a transaction open.")
    token = token or uuid.uuid4()
    deadline = time.monotonic() + lease_seconds
    values = {
        "ids": array_of_ids(ids),
        "types": array(handlers),
        "batches": array(batch_of(handler) for handler in handlers.values()),
        "relaxed": array(handler.transactional and not durable for handler in handlers.values()),
        "token": token,
        "holder": holder,
        "lease_seconds": lease_seconds,
        **more,
    }
    rows = statement.rows(connection, values)
    if commits:
        connection.commit()
    return _sorted(Claim(token, deadline), rows)


def task_of(columns: Sequence[Any]) -> Task:
    """From a row that begins with these columns."""
    return Task(columns[0], columns[1], columns[2], columns[3] or {}, *columns[4:_COUNT])


def _sorted(found: Claim, rows: Iterable[Sequence[Any]]) -> Claim:
    others = {
        "SKIPPED": found.skipped,
        "NOT_DUE": found.not_due,
        "UNHANDLED": found.unhandled,
        "LEFT": found.left,
        "KEYED": found.keyed,
        "NEXT": found.next_in_line,
    }
    for row in rows:
        if row[-1] == "RUN":
            found.tasks.append(task_of(row))
        else:
            others[row[-1]].append(row[0])
    return found
