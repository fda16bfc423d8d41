"""The SQL of the claim: one statement decides which of the delivered tasks may run, and leases them to this process.

    QUEUED | RETRYING, due ──claim──► RUNNING, leased ──settle──► SUCCEEDED | RETRYING | DEAD | DISCARDED
                                                     └─release─► QUEUED

Every delivered id gets a verdict:

    RUN        claimed
    SKIPPED    running, final, expired, unknown, or locked by another transaction at this moment
    NOT_DUE    its time has not come, or a task before it in its partition key waits
    PAUSED     an operator has paused its queue; resuming the queue wakes it again
    NEXT       it is directly behind the running task of its partition key
    UNHANDLED  this process has no handler for it, as in a rolling deploy
    KEYED      it has a partition key: `CLAIM_KEYED` is for these
    LIMITED    its handler has limits: `limits.py` is for these
    LEFT       of another type, queue, priority or isolation, or too many for one batch: for the next claim

The ids of the message come first; the rest of the batch is filled with other due tasks of the same queue and type
(docs/protocol.md, Wake-up rule), and with partition keys by the tasks behind its own. A task that must run alone
(Poison) is a batch of its own. Rows that other transactions have locked are skipped. Of the claimed tasks, the one that
has waited longest runs first; those of a partition key run in their order. A task that starts no longer expires; one
that has expired is left to `tasks/recovery/expired_tasks.py`.

For transactional handlers the claim is committed asynchronously: if the server loses it in a crash, their effects are
lost with it, and the task is claimed again. The claim of any other handler waits until it is on disk. So does a
`durable` claim: after it, the sender forgets the ids, and only the ledger knows them (Durability).
"""

from __future__ import annotations

from typing import Final

from models.prepared_statements import Prepared
from models.sql import sql
from tasks.core.due_times import DUE_AT, IS_PAUSED, NOT_EXPIRED, OPEN, SINCE, TIME
from tasks.core.limits import limit_key_of
from tasks.core.partition_keys import BLOCKS, UNDONE

DUE: Final = f"{TIME} <= (SELECT at FROM clock)"


def columns(content: str = "payload, nullif(context, '{}') AS context") -> str:
    """Return the columns of a task in the order of `Task`."""
    return f"""id, type, {content}, queue, priority, attempt_count, max_attempts, idempotency_key, next_retry_at,
                  created_at, partition_key, key_seq, isolated"""


# contents: payload and context as they were submitted; a handler may have changed its copy.
CONTENTS: Final = sql("""
    SELECT id, payload, nullif(context, '{}') FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[]))
""")
# running: the tasks that are still held under these tokens, without their payloads.
RUNNING: Final = sql(f"""
    SELECT lease_token, {columns("NULL, NULL")}
    FROM ledger.ingest_task
    WHERE id IN (SELECT unnest(task_ids) FROM ledger.task_lease WHERE token = ANY(CAST(:tokens AS uuid[])))
      AND lease_token = ANY(CAST(:tokens AS uuid[])) AND status = 'RUNNING'
    ORDER BY id
""")
# losses: how many of the latest runs of a task, counted back from the last one, ended with this message; the largest
# number among these tasks. Any other end of a run stops the count.
LOSSES: Final = sql("""
    SELECT coalesce(max(losses), 0) FROM unnest(CAST(:ids AS uuid[])) AS given(id) CROSS JOIN LATERAL (
        SELECT count(*) AS losses FROM (
            SELECT bool_and(message = :message) OVER (ORDER BY id DESC) AS was_lost
            FROM (SELECT id, coalesce(message, '') AS message FROM ledger.ingest_task_transition
                  WHERE task_id = given.id AND from_status = 'RUNNING' ORDER BY id DESC LIMIT 10) AS ended) AS run
        WHERE was_lost) AS of_task
""")


def claim_statement(choose: str, *, verdict: str, sets: str = "limited_at = NULL") -> Prepared:
    """Return a claim: QUEUED|RETRYING and due → RUNNING under a new lease, with transitions. Other ids get a verdict.

    `own` are the delivered ids with their rows. `choose` chooses `kind` (type, queue, priority) from them, then `mine`
    (own ids of that kind, at most a batch), and locks `held`, the tasks that are claimed, with the time since when each
    of them has waited. `sets` is what else is set in them. `relaxed` switches to an asynchronous commit; the final
    SELECT joins it because PostgreSQL does not execute a CTE that is not read.
    """
    return Prepared(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    given AS MATERIALIZED (
        SELECT id, min(place) AS place
        FROM unnest(CAST(:ids AS uuid[])) WITH ORDINALITY AS given(id, place) GROUP BY id),
    known AS MATERIALIZED (
        SELECT * FROM unnest(CAST(:types AS text[]), CAST(:batches AS integer[]), CAST(:relaxed AS boolean[]),
                             CAST(:limited AS boolean[])) AS known(type, batch, relaxed, limited)),
    own AS MATERIALIZED (
        SELECT id, place, type, queue, priority, isolated, last_wakeup_at, {OPEN} AND {NOT_EXPIRED} AS open,
               {DUE} AS due, known.batch, known.relaxed, known.limited, partition_key, key_seq,
               coalesce({IS_PAUSED}, false) AS paused
        FROM given LEFT JOIN LATERAL (
            SELECT type, queue, priority, isolated, last_wakeup_at, status, next_retry_at, partition_key, key_seq,
                   expires_at
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
    transitions AS (
        INSERT INTO ledger.ingest_task_transition (task_id, from_status, to_status, attempt_count, actor, created_at)
        SELECT id, status, 'RUNNING', attempt_count, CAST(:holder AS text), at FROM held CROSS JOIN clock),
    run AS (
        UPDATE ledger.ingest_task
        SET status = 'RUNNING', lease_token = CAST(:token AS uuid), updated_at = (SELECT at FROM clock),
            expires_at = NULL, {sets}
        WHERE id = ANY(ARRAY(SELECT id FROM held))
        RETURNING {columns()})
    (SELECT run.*, CAST(extract(epoch FROM at - since) AS float8) AS waited, 'RUN' AS verdict
     FROM run JOIN held USING (id) CROSS JOIN clock LEFT JOIN relaxed ON true ORDER BY since, id)
    UNION ALL
    (SELECT own.id, own.type, NULL, NULL, own.queue, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
            CASE WHEN NOT coalesce(open, false) THEN 'SKIPPED' WHEN NOT due THEN 'NOT_DUE' WHEN paused THEN 'PAUSED'
                 WHEN batch IS NULL THEN 'UNHANDLED' {verdict}
                 WHEN own.id IN (SELECT id FROM mine) THEN 'SKIPPED' ELSE 'LEFT' END
     FROM own WHERE own.id NOT IN (SELECT id FROM held) ORDER BY place)
    """)


# For tasks that were admitted under their limits. The running tasks of a limit are counted by their `limit_key`.
_WITH_LIMIT: Final = f"limited_at = NULL, limit_key = {limit_key_of('CAST(:limit_by AS text)')}"

# own ids first, then other due tasks of the same queue and type; locked rows are skipped.
_CHOOSE: Final = f"""
    kind AS MATERIALIZED (
        SELECT type, queue, priority, isolated, CASE WHEN isolated THEN 1 ELSE batch END AS most, relaxed
        FROM own WHERE open AND due AND NOT paused AND partition_key IS NULL AND NOT limited
        ORDER BY isolated, place LIMIT 1),
    mine AS MATERIALIZED (
        SELECT own.id, own.last_wakeup_at FROM own JOIN kind USING (type, queue, priority, isolated)
        WHERE open AND due AND partition_key IS NULL ORDER BY place LIMIT (SELECT most FROM kind)),
    others AS MATERIALIZED (
        SELECT task.id FROM kind CROSS JOIN LATERAL (
            SELECT id FROM ledger.ingest_task
            WHERE queue = kind.queue AND type = kind.type AND {OPEN} AND NOT isolated
              AND {DUE_AT} <= (SELECT at FROM clock) AND {NOT_EXPIRED} AND id <> ALL(CAST(:ids AS uuid[]))
            ORDER BY {DUE_AT}, id
            LIMIT (SELECT kind.most - count(*) FROM mine) FOR NO KEY UPDATE SKIP LOCKED) AS task
        WHERE NOT kind.isolated AND (SELECT count(*) FROM mine) < kind.most),
    held AS MATERIALIZED (
        SELECT task.* FROM (SELECT id FROM mine UNION ALL SELECT id FROM others ORDER BY id) AS wanted
        CROSS JOIN LATERAL (
            SELECT id, status, attempt_count, {SINCE} AS since FROM ledger.ingest_task
            WHERE id = wanted.id AND {OPEN} AND {DUE} AND {NOT_EXPIRED} FOR NO KEY UPDATE SKIP LOCKED) AS task)"""
_VERDICT: Final = "WHEN partition_key IS NOT NULL THEN 'KEYED' WHEN limited THEN 'LIMITED'"
CLAIM: Final = claim_statement(_CHOOSE, verdict=_VERDICT)
CLAIM_ADMITTED: Final = claim_statement(_CHOOSE, verdict=_VERDICT, sets=_WITH_LIMIT)

# own ids whose turn it is, then the tasks that follow them in their partition keys without a gap.
_CHOOSE_KEYED: Final = f"""
    turn AS MATERIALIZED (
        SELECT own.*, (
            SELECT status FROM ledger.ingest_task before
            WHERE before.partition_key = own.partition_key AND before.key_seq < own.key_seq AND {BLOCKS}
            ORDER BY before.key_seq DESC LIMIT 1) AS before
        FROM own WHERE open AND due AND NOT paused AND batch IS NOT NULL AND own.partition_key IS NOT NULL),
    kind AS MATERIALIZED (
        SELECT type, queue, priority, isolated, CASE WHEN isolated THEN 1 ELSE batch END AS most, relaxed
        FROM turn WHERE before IS NULL AND NOT limited ORDER BY isolated, place LIMIT 1),
    mine AS MATERIALIZED (
        SELECT turn.id, turn.last_wakeup_at, partition_key, key_seq
        FROM turn JOIN kind USING (type, queue, priority, isolated)
        WHERE before IS NULL ORDER BY place LIMIT (SELECT most FROM kind)),
    run_on AS MATERIALIZED (
        SELECT next.* FROM kind CROSS JOIN mine CROSS JOIN LATERAL (
            SELECT id, partition_key, key_seq, bool_and(fits) OVER in_order AS fits, row_number() OVER in_order AS place
            FROM (
                SELECT id, partition_key, key_seq, NOT isolated AND {OPEN} AND {DUE} AND {NOT_EXPIRED}
                           AND type = kind.type AND queue = kind.queue AND priority = kind.priority AS fits
                FROM ledger.ingest_task WHERE partition_key = mine.partition_key AND key_seq > mine.key_seq AND {UNDONE}
                ORDER BY key_seq LIMIT (SELECT kind.most / count(*) FROM mine)) AS following
            WINDOW in_order AS (ORDER BY key_seq)) AS next
        WHERE fits AND NOT kind.isolated
        ORDER BY place, partition_key LIMIT (SELECT kind.most - count(*) FROM kind, mine GROUP BY kind.most)),
    wanted AS MATERIALIZED (
        SELECT id, partition_key, key_seq FROM mine UNION ALL SELECT id, partition_key, key_seq FROM run_on),
    locked AS MATERIALIZED (
        SELECT task.* FROM (SELECT id FROM wanted ORDER BY id) AS wanted CROSS JOIN LATERAL (
            SELECT id, status, attempt_count, {SINCE} AS since FROM ledger.ingest_task
            WHERE id = wanted.id AND {OPEN} AND {DUE} AND {NOT_EXPIRED} FOR NO KEY UPDATE SKIP LOCKED) AS task),
    held AS MATERIALIZED (
        SELECT id, status, attempt_count, since FROM (
            SELECT wanted.id, status, attempt_count, since,
                   bool_and(locked.id IS NOT NULL) OVER (PARTITION BY partition_key ORDER BY key_seq) AS unbroken
            FROM wanted LEFT JOIN locked ON locked.id = wanted.id) AS run
        WHERE unbroken)"""
_VERDICT_KEYED: Final = """WHEN partition_key IS NULL THEN 'LEFT'
                 WHEN (SELECT before FROM turn WHERE turn.id = own.id) = 'RUNNING' THEN 'NEXT'
                 WHEN (SELECT before FROM turn WHERE turn.id = own.id) IS NOT NULL THEN 'NOT_DUE'
                 WHEN limited THEN 'LIMITED'"""
CLAIM_KEYED: Final = claim_statement(_CHOOSE_KEYED, verdict=_VERDICT_KEYED)
CLAIM_KEYED_ADMITTED: Final = claim_statement(_CHOOSE_KEYED, verdict=_VERDICT_KEYED, sets=_WITH_LIMIT)
