"""The SQL of limits: lock them, then admit tasks under them (docs/protocol.md, Limits).

Two statements, because the second must see what other transactions have committed before they gave up the lock: a
statement does not see commits that happen while it waits for a lock.
"""

from __future__ import annotations

from typing import Final

from models.prepared_statements import Prepared
from tasks.core import wakeups
from tasks.core.due_times import IS_PAUSED, NOT_EXPIRED, OPEN, TIME
from tasks.core.limits import LIMITS, limit_key_of

MOST_WOKEN: Final = 100  # waiting tasks of one limit that are woken at once; one more continues with the rest
LEAST_PAUSE_SECONDS: Final = 0.5  # between two wake-ups for a rate; a high rate starts many tasks with each
LONGEST_PAUSE_MS: Final = 10_000  # in the transaction of a process that has locked a limit; then it is ended

_KEYS: Final = "unnest(CAST(:key_types AS text[]), CAST(:limit_keys AS text[])) AS given(type, limit_key)"


def _lock(source: str) -> Prepared:
    """Return a statement that locks the limits in `source` in one order, refills their tokens, and returns them.

    A type whose limits the caller does not know is locked only. A process that is stopped before its commit would keep
    all other workers from starting tasks under the same limit: PostgreSQL ends its transaction.
    """
    rate = "(SELECT rate FROM limits WHERE limits.type = task_limit.type)"
    seconds = "greatest(extract(epoch FROM excluded.refilled_at - task_limit.refilled_at), 0)"
    return Prepared(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    {LIMITS},
    guard AS MATERIALIZED (
        SELECT set_config('idle_in_transaction_session_timeout', '{LONGEST_PAUSE_MS}', true) AS milliseconds)
    INSERT INTO ledger.task_limit (type, limit_key, tokens, refilled_at)
    SELECT DISTINCT type, limit_key, coalesce(burst, 0), at
    FROM ({source}) AS source LEFT JOIN limits USING (type) CROSS JOIN clock CROSS JOIN guard
    WHERE milliseconds IS NOT NULL ORDER BY type, limit_key
    ON CONFLICT (type, limit_key) DO UPDATE
    SET tokens = CASE WHEN {rate} IS NULL THEN task_limit.tokens
                      ELSE least(excluded.tokens, task_limit.tokens + {rate} * {seconds}) END,
        refilled_at = CASE WHEN task_limit.type IN (SELECT type FROM limits)
                           THEN greatest(task_limit.refilled_at, excluded.refilled_at) ELSE task_limit.refilled_at END
    RETURNING type, limit_key
    """)


# lock_for_claim: the limits of open tasks that want to run.
LOCK_FOR_CLAIM: Final = _lock(f"""
        SELECT type, {limit_key_of("limit_by")} AS limit_key
        FROM unnest(CAST(:ids AS uuid[])) AS given(id) CROSS JOIN LATERAL (
            SELECT type, context, payload FROM ledger.ingest_task WHERE id = given.id AND {OPEN} OFFSET 0) AS task
        JOIN limits USING (type)""")
# lock_of_tasks: the limits under which these tasks have run or have waited.
LOCK_OF_TASKS: Final = _lock("""
        SELECT task.type, task.limit_key FROM unnest(CAST(:ids AS uuid[])) AS given(id) CROSS JOIN LATERAL (
            SELECT type, limit_key FROM ledger.ingest_task
            WHERE id = given.id AND limit_key IS NOT NULL OFFSET 0) AS task""")
# lock_keys: the given limits.
LOCK_KEYS: Final = _lock(f"SELECT type, limit_key FROM {_KEYS}")

# admit: choose the tasks that may start now, from the delivered ids and the tasks that wait for the same limits, in
# the order of priority and waiting. `taken` is the batch for this process: of one kind, at most `:most`. A task that
# may start but is not in it gets a wake-up. A delivered task that may not start waits: QUEUED|RETRYING → unchanged,
# `limited_at` set, without a wake-up. If the rate holds it back, the first such task has a wake-up for its time.
# `last_wakeup_at` of a waiting task is not NULL while a wake-up for it is on its way, so it gets no second one, unless
# the one on its way is for a later time because the limits were lower. Tasks of a paused queue are neither admitted nor
# woken, and take no place from those of other queues.
ADMIT: Final = Prepared(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    {LIMITS},
    key AS MATERIALIZED (
        SELECT type, limit_key, rate, tokens, allowed, least(allowed, greatest(
                   {MOST_WOKEN}, CAST(CAST(:most AS jsonb) ->> type AS integer))) AS free
        FROM {_KEYS} JOIN ledger.task_limit USING (type, limit_key) LEFT JOIN limits USING (type)
        CROSS JOIN LATERAL (
            SELECT count(*) AS running FROM ledger.ingest_task task
            WHERE task.type = given.type AND task.limit_key = given.limit_key AND status = 'RUNNING'
              AND max_running IS NOT NULL) AS counted
        CROSS JOIN LATERAL (
            SELECT CAST(greatest(least(max_running - running, CASE WHEN rate IS NOT NULL THEN floor(tokens) END), 0)
                        AS integer) AS allowed WHERE max_running IS NOT NULL OR rate IS NOT NULL
            UNION ALL SELECT NULL WHERE max_running IS NULL AND rate IS NULL) AS limited),
    own AS MATERIALIZED (
        SELECT id, place, type, queue, priority, isolated, keyed, {limit_key_of("limit_by")} AS limit_key, limited_at,
               last_wakeup_at
        FROM unnest(CAST(:ids AS uuid[])) WITH ORDINALITY AS given(id, place) CROSS JOIN LATERAL (
            SELECT type, queue, priority, isolated, partition_key IS NOT NULL AS keyed, context, payload, limited_at,
                   last_wakeup_at
            FROM ledger.ingest_task
            WHERE id = given.id AND {OPEN} AND {TIME} <= (SELECT at FROM clock) AND NOT {IS_PAUSED} AND {NOT_EXPIRED}
            OFFSET 0) AS task
        JOIN limits USING (type)),
    kind AS MATERIALIZED (
        SELECT type, queue, priority, isolated, keyed FROM own ORDER BY isolated, place LIMIT 1),
    candidate AS MATERIALIZED (
        SELECT id, place, type, queue, priority, isolated, keyed, limit_key, limited_at, last_wakeup_at, true AS is_own
        FROM own WHERE type = (SELECT type FROM kind)
        UNION ALL
        SELECT waiting.id, NULL, waiting.type, waiting.queue, waiting.priority, waiting.isolated,
               waiting.partition_key IS NOT NULL, waiting.limit_key, waiting.limited_at, waiting.last_wakeup_at, false
        FROM key CROSS JOIN LATERAL (
            SELECT * FROM ledger.ingest_task task
            WHERE task.type = key.type AND task.limit_key = key.limit_key AND limited_at IS NOT NULL AND {OPEN}
              AND id <> ALL(CAST(:ids AS uuid[])) AND NOT {IS_PAUSED} AND {NOT_EXPIRED}
            ORDER BY priority DESC, limited_at, id LIMIT key.free + 1) AS waiting),
    ranked AS MATERIALIZED (
        SELECT candidate.*, allowed, free, tokens, rate, row_number() OVER (
            PARTITION BY type, limit_key
            ORDER BY priority DESC, coalesce(limited_at, (SELECT at FROM clock)), id) AS rank
        FROM candidate JOIN key USING (type, limit_key)),
    taken AS MATERIALIZED (
        SELECT ranked.id, type, limit_key FROM ranked JOIN kind USING (type, queue, priority, isolated, keyed)
        WHERE rank <= free ORDER BY is_own DESC, place, rank
        LIMIT (SELECT CASE WHEN isolated THEN 1 ELSE CAST(CAST(:most AS jsonb) ->> type AS integer) END FROM kind)),
    rest AS MATERIALIZED (
        SELECT id, limit_key, is_own, limited_at, last_wakeup_at, at,
               CASE WHEN rank <= free OR (rank = free + 1 AND coalesce(allowed > free, true)) THEN at
                    WHEN rank = free + 1 AND tokens < rank AND rate IS NOT NULL
                    THEN at + make_interval(secs => greatest((rank - tokens) / rate, {LEAST_PAUSE_SECONDS})) END
               AS wake_at
        FROM ranked CROSS JOIN clock WHERE id NOT IN (SELECT id FROM taken)),
    changing AS MATERIALIZED (
        SELECT * FROM rest
        WHERE CASE WHEN limited_at IS NULL THEN true
                   WHEN is_own THEN coalesce(last_wakeup_at <= at, wake_at IS NOT NULL)
                   ELSE wake_at IS NOT NULL AND coalesce(last_wakeup_at > wake_at + interval '1 s', true) END),
    held AS MATERIALIZED (
        SELECT id FROM ledger.ingest_task WHERE id = ANY(ARRAY(SELECT id FROM changing)) AND {OPEN}
        ORDER BY id FOR NO KEY UPDATE SKIP LOCKED),
    changed AS (
        UPDATE ledger.ingest_task task
        SET limit_key = changing.limit_key, limited_at = coalesce(task.limited_at, at), last_wakeup_at = wake_at,
            updated_at = at
        FROM changing JOIN held USING (id) WHERE task.id = changing.id AND task.id = ANY(ARRAY(SELECT id FROM held))
        RETURNING task.id, task.type, queue, priority, isolated, CASE WHEN wake_at > at THEN wake_at END AS due_at,
                  wake_at),
    again AS (SELECT id, type, queue, priority, isolated, due_at FROM changed WHERE wake_at IS NOT NULL),
    spent AS (
        UPDATE ledger.task_limit task_limit SET tokens = task_limit.tokens - number
        FROM (SELECT type, limit_key, count(*) AS number FROM taken JOIN key USING (type, limit_key)
              WHERE rate IS NOT NULL GROUP BY type, limit_key) AS used
        WHERE task_limit.type = used.type AND task_limit.limit_key = used.limit_key),
    {wakeups.insert_wakeups("again")}
    SELECT (SELECT type FROM kind) AS type, (SELECT keyed FROM kind) AS keyed, ARRAY(SELECT id FROM taken) AS taken,
           ARRAY(SELECT id FROM rest WHERE is_own) AS waiting,
           ARRAY(SELECT id FROM own WHERE type <> (SELECT type FROM kind) ORDER BY place) AS left_over,
           (SELECT count(*) FROM again) AS woken, ours
    FROM wakeups
""")
