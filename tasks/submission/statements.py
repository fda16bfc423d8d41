"""The statements of submitting: a task, its first transition and its ring at once."""

# ruff: noqa: S608 - every piece is a literal of our own; values are parameters

from __future__ import annotations

from typing import Final

from sqlalchemy import text

from models.prepared import Prepared
from tasks.core import wakeups

# submit_one: what `models/submit_function.py` says; its plans are kept with the connection.
SUBMIT_ONE: Final = Prepared("""
    SELECT created, status, same, ring, stamp
    FROM ingest_submit_task(:id, :type, :payload, :context, :queue, :priority, :key, :max_attempts, :run_at,
                            :delay_seconds, :notify, :actor, :batch, :ring_holder, :ring_token, :ring_seconds,
                            :partition_key)
""")

# draw_turns: all keys are locked, in the order given, before anything is written; then so many places are drawn.
DRAW_TURNS: Final = text("""
    WITH locked AS MATERIALIZED (SELECT ingest_key_lock(key) FROM unnest(CAST(:keys AS text[])) AS given(key))
    SELECT nextval('ingest_task_key_seq') FROM generate_series(1, :count) WHERE (SELECT count(*) FROM locked) > 0
""")

# submit: → QUEUED, with its first transition and its ring; ids that exist are left alone, those of pruned tasks too.
SUBMIT: Final = text(f"""
    WITH clock AS MATERIALIZED (SELECT ledger_now() AS at),
    given AS MATERIALIZED (
        SELECT given.*, coalesce(run_at, at + make_interval(secs => delay_seconds)) AS starts_at, at
        FROM unnest(CAST(:id AS uuid[]), CAST(:type AS text[]), CAST(:payload AS jsonb[]), CAST(:context AS jsonb[]),
                    CAST(:queue AS text[]), CAST(:priority AS smallint[]), CAST(:key AS text[]),
                    CAST(:max_attempts AS integer[]), CAST(:run_at AS timestamptz[]),
                    CAST(:delay_seconds AS double precision[]), CAST(:notify AS text[]),
                    CAST(:partition_key AS text[]), CAST(:key_seq AS bigint[]))
             WITH ORDINALITY AS given(id, type, payload, context, queue, priority, key, max_attempts, run_at,
                                      delay_seconds, notify, partition_key, key_seq, place) CROSS JOIN clock),
    born AS (
        INSERT INTO ingest_task (id, type, payload, context, queue, priority, idempotency_key, max_attempts,
                                 next_retry_at, rung_at, notify, created_at, updated_at, partition_key, key_seq)
        SELECT id, type, payload, context, queue, priority, key, max_attempts,
               CASE WHEN starts_at > at THEN starts_at END, greatest(starts_at, at), notify, at, at, partition_key,
               key_seq
        FROM given ORDER BY place
        ON CONFLICT (id) DO NOTHING
        RETURNING id, type, queue, priority, isolated, next_retry_at AS due_at, idempotency_key),
    gave_way AS MATERIALIZED (
        SELECT ingest_give_way(array_agg(id)) AS ids FROM born WHERE idempotency_key IS NOT NULL HAVING count(*) > 0),
    kept AS MATERIALIZED (
        SELECT * FROM born WHERE id <> ALL(coalesce((SELECT ids FROM gave_way), '{{}}'))),
    told AS (
        INSERT INTO ingest_task_transition (task_id, to_status, actor, created_at)
        SELECT id, 'QUEUED', :actor, at FROM kept CROSS JOIN clock),
    {wakeups.rung("kept")}
    SELECT CASE WHEN (SELECT count(*) FROM kept) < cardinality(CAST(:id AS uuid[]))
                THEN (SELECT coalesce(array_agg(id), '{{}}') FROM kept) END,
           (SELECT coalesce(array_agg(id), '{{}}') FROM rung), ours
    FROM rings
""")

# existing: what stands where a submit found its id taken; a tombstone is what is left of a pruned task (P10).
EXISTING: Final = text("""
    SELECT coalesce(task.status, stone.status),
           coalesce(task.payload = given.payload, stone.payload_sha = ingest_payload_sha(given.payload))
    FROM unnest(CAST(:id AS uuid[]), CAST(:payload AS jsonb[])) WITH ORDINALITY AS given(id, payload, place)
    LEFT JOIN ingest_task task USING (id) LEFT JOIN task_tombstone stone USING (id)
    ORDER BY place
""")

# take_back: tasks that were submitted a moment ago in this transaction, as if they had not been.
TAKE_BACK: Final = text("""
    WITH tasks AS (DELETE FROM ingest_task WHERE id = ANY(CAST(:ids AS uuid[]))),
    told AS (DELETE FROM ingest_task_transition WHERE task_id = ANY(CAST(:ids AS uuid[])))
    DELETE FROM outbox_event WHERE id = ANY(CAST(:rings AS bigint[]))
""")
