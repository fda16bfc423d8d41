"""Submitting from SQL, the memory of pruned keys and of rings, indexes; the reasons stand beside the models."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"

UPGRADE = (
    """CREATE TABLE task_tombstone (
    id uuid NOT NULL,
    status text NOT NULL,
    payload_sha text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT ledger_now(),
    CONSTRAINT pk_task_tombstone PRIMARY KEY (id)
)""",
    """CREATE TABLE ring_horizon (
    queue text NOT NULL,
    priority smallint NOT NULL,
    seen_rung_at timestamptz NOT NULL,
    seen_at timestamptz NOT NULL,
    passed_rung_at timestamptz,
    CONSTRAINT pk_ring_horizon PRIMARY KEY (queue, priority)
)""",
    "ALTER TABLE task_lease ADD COLUMN rung_at timestamptz",
    "DROP INDEX ix_ingest_task_due",
    """CREATE INDEX ix_ingest_task_due ON ingest_task (queue, type, coalesce(next_retry_at, '-infinity'), id)
       WHERE status IN ('QUEUED', 'RETRYING')""",
    "CREATE INDEX ix_task_tombstone_created_at ON task_tombstone (created_at)",
    """CREATE INDEX ix_ingest_task_done ON ingest_task (finished_at) WHERE status IN ('SUCCEEDED', 'DISCARDED')""",
    r"""CREATE FUNCTION ingest_payload_sha(payload jsonb) RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
RETURN encode(sha256(convert_to(regexp_replace(CAST(payload AS text),
    '("(?:[^"\\]|\\.)*")|(\.[0-9]*[1-9])0+(?![0-9])|\.0+(?![0-9])', '\1\2', 'g'), 'UTF8')), 'hex')""",
    """CREATE FUNCTION ingest_task_id(type text, key text) RETURNS uuid LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
DECLARE
    raw bytea := substring(sha256(convert_to(type || chr(31) || key, 'UTF8')) FROM 1 FOR 16);
BEGIN
    raw := set_byte(raw, 6, (get_byte(raw, 6) & 15) | 128);
    RETURN CAST(encode(set_byte(raw, 8, (get_byte(raw, 8) & 63) | 128), 'hex') AS uuid);
END $$""",
    """CREATE FUNCTION ingest_fresh_id() RETURNS uuid LANGUAGE plpgsql PARALLEL SAFE AS $$
DECLARE
    raw bytea := decode(lpad(to_hex(CAST(extract(epoch FROM ledger_now()) * 1000 AS bigint)), 12, '0'), 'hex')
                 || substring(uuid_send(gen_random_uuid()) FROM 7);
BEGIN
    RETURN CAST(encode(set_byte(raw, 6, (get_byte(raw, 6) & 15) | 112), 'hex') AS uuid);
END $$""",
    """CREATE FUNCTION ingest_give_way(ids uuid[]) RETURNS uuid[] LANGUAGE plpgsql AS $$
DECLARE
    gave_way uuid[];
BEGIN
    WITH gone AS (
        DELETE FROM ingest_task task USING task_tombstone stone
        WHERE stone.id = ANY(ids) AND task.id = stone.id RETURNING task.id)
    SELECT coalesce(array_agg(id), '{}') INTO gave_way FROM gone;
    RETURN gave_way;
END $$""",
    """CREATE FUNCTION ingest_submit_task(
    task uuid, type text, payload jsonb, context jsonb, queue text, priority integer, key text, max_attempts integer,
    run_at timestamptz, delay_seconds double precision, notify text, actor text, batch integer,
    holder text, token uuid, lease_seconds double precision,
    OUT created boolean, OUT status text, OUT same boolean, OUT ring bigint, OUT stamp timestamptz
) LANGUAGE plpgsql AS $$
DECLARE
    due timestamptz;
    leased boolean;
BEGIN
    stamp := ledger_now();
    due := coalesce(run_at, stamp + make_interval(secs => delay_seconds));
    due := CASE WHEN due > stamp THEN due END;
    leased := due IS NULL AND token IS NOT NULL;
    INSERT INTO ingest_task (id, type, payload, context, queue, priority, idempotency_key, max_attempts,
                             next_retry_at, rung_at, notify, created_at, updated_at)
    VALUES (task, type, payload, context, queue, priority, key, max_attempts,
            due, coalesce(due, stamp), notify, stamp, stamp)
    ON CONFLICT (id) DO NOTHING;
    created := FOUND AND (key IS NULL OR ingest_give_way(ARRAY[task]) = '{}');
    IF created THEN
        status := 'QUEUED';
        INSERT INTO ingest_task_transition (task_id, to_status, actor, created_at)
        VALUES (task, 'QUEUED', actor, stamp);
        INSERT INTO outbox_event (destination, payload, headers, next_retry_at, created_at,
                                  locked_by, locked_at, lease_token, lease_until)
        VALUES ('celery:' || queue,
                jsonb_build_object('type', type, 'ids', jsonb_build_array(task), 'batch', batch),
                jsonb_build_object('priority', priority), due, stamp,
                CASE WHEN leased THEN holder END, CASE WHEN leased THEN stamp END, CASE WHEN leased THEN token END,
                CASE WHEN leased THEN stamp + make_interval(secs => lease_seconds) END)
        RETURNING CASE WHEN leased THEN id END INTO ring;
    ELSE
        SELECT coalesce(existing.status, stone.status),
               coalesce(existing.payload = ingest_submit_task.payload,
                        stone.payload_sha = ingest_payload_sha(ingest_submit_task.payload))
        INTO status, same
        FROM (VALUES (task)) AS given(id)
        LEFT JOIN ingest_task existing USING (id) LEFT JOIN task_tombstone stone USING (id);
    END IF;
END $$""",
    r"""CREATE FUNCTION ingest_submit(type text, payload jsonb, key text DEFAULT NULL, queue text DEFAULT 'ingest',
                              run_at timestamptz DEFAULT NULL)
RETURNS uuid LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    task uuid := CASE WHEN key IS NULL THEN ingest_fresh_id() ELSE ingest_task_id(type, key) END;
    answer record;
BEGIN
    payload := coalesce(payload, 'null');
    IF type IS NULL OR type !~ '^[A-Za-z0-9][A-Za-z0-9_.:-]{0,99}$' THEN
        RAISE EXCEPTION USING ERRCODE = 'CL400',
            MESSAGE = 'A type is named with letters, digits and . _ : - only, at most 100.';
    ELSIF length(key) NOT BETWEEN 1 AND 500 OR key ~ '[\u0001-\u001f\u007f-\u009f]' THEN
        RAISE EXCEPTION USING ERRCODE = 'CL400',
            MESSAGE = 'A key is text of 1 to 500 characters without control characters.';
    ELSIF octet_length(CAST(payload AS text)) > 1048576 THEN
        RAISE EXCEPTION USING ERRCODE = 'CL413',
            MESSAGE = format('The payload has %s bytes, and 1048576 is the most.', octet_length(CAST(payload AS text)));
    END IF;
    SELECT * INTO answer FROM ingest_submit_task(
        task, type, payload, '{}', queue, 5, key, 10, run_at, NULL, NULL, current_user, 100, NULL, NULL, NULL);
    IF answer.status IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
            MESSAGE = format('The task %s was pruned at this very moment: submit it again.', task);
    ELSIF NOT answer.created AND NOT answer.same THEN
        RAISE EXCEPTION USING ERRCODE = 'CL409',
            MESSAGE = format('The key belongs to the task %s, which has another payload.', task);
    END IF;
    RETURN task;
END $$""",
)

DOWNGRADE = (
    "DROP FUNCTION ingest_submit",
    "DROP FUNCTION ingest_submit_task",
    "DROP FUNCTION ingest_give_way",
    "DROP FUNCTION ingest_fresh_id",
    "DROP FUNCTION ingest_task_id",
    "DROP FUNCTION ingest_payload_sha",
    "DROP INDEX ix_ingest_task_done",
    "DROP INDEX ix_ingest_task_due",
    """CREATE INDEX ix_ingest_task_due ON ingest_task (queue, type, coalesce(next_retry_at, '-infinity'))
       WHERE status IN ('QUEUED', 'RETRYING')""",
    "ALTER TABLE task_lease DROP COLUMN rung_at",
    "DROP TABLE ring_horizon",
    "DROP TABLE task_tombstone",
)


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
