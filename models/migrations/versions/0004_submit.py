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
    """CREATE FUNCTION ingest_payload_sha(payload jsonb) RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
RETURN encode(sha256(convert_to(CAST(payload AS text), 'UTF8')), 'hex')""",
    """CREATE FUNCTION ingest_task_id(type text, key text) RETURNS uuid LANGUAGE plpgsql STABLE AS $$
DECLARE
    raw bytea;
BEGIN
    IF key IS NULL THEN  -- UUIDv7: 48 bits of milliseconds, the rest at random
        raw := decode(lpad(to_hex(CAST(extract(epoch FROM ledger_now()) * 1000 AS bigint)), 12, '0'), 'hex')
               || substring(uuid_send(gen_random_uuid()) FROM 7);
        RETURN CAST(encode(set_byte(raw, 6, (get_byte(raw, 6) & 15) | 112), 'hex') AS uuid);
    END IF;
    raw := substring(sha256(convert_to(type || chr(31) || key, 'UTF8')) FROM 1 FOR 16);  -- UUIDv8
    raw := set_byte(raw, 6, (get_byte(raw, 6) & 15) | 128);
    RETURN CAST(encode(set_byte(raw, 8, (get_byte(raw, 8) & 63) | 128), 'hex') AS uuid);
END $$""",
    """CREATE FUNCTION ingest_submit(type text, payload jsonb, key text DEFAULT NULL, queue text DEFAULT 'ingest',
                              run_at timestamptz DEFAULT NULL) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    task uuid := ingest_task_id(type, key);
    stamp timestamptz := ledger_now();
    same boolean;
BEGIN
    SELECT stone.payload_sha = ingest_payload_sha(ingest_submit.payload) INTO same
    FROM task_tombstone stone WHERE stone.id = task;
    IF NOT FOUND THEN
        INSERT INTO ingest_task (id, type, payload, queue, idempotency_key, next_retry_at, rung_at,
                                 created_at, updated_at)
        VALUES (task, ingest_submit.type, ingest_submit.payload, ingest_submit.queue, ingest_submit.key,
                ingest_submit.run_at, coalesce(ingest_submit.run_at, stamp), stamp, stamp)
        ON CONFLICT (id) DO NOTHING;
        IF FOUND THEN
            INSERT INTO ingest_task_transition (task_id, to_status, created_at) VALUES (task, 'QUEUED', stamp);
            INSERT INTO outbox_event (destination, payload, headers, next_retry_at, created_at)
            VALUES ('celery:' || ingest_submit.queue,
                    jsonb_build_object('type', ingest_submit.type, 'ids', jsonb_build_array(task), 'batch', 100),
                    '{"priority": 5}', ingest_submit.run_at, stamp);
            RETURN task;
        END IF;
        SELECT existing.payload = ingest_submit.payload INTO same FROM ingest_task existing WHERE existing.id = task;
    END IF;
    IF NOT same THEN
        RAISE EXCEPTION USING ERRCODE = 'CL409',
            MESSAGE = format('The key belongs to the task %s, which has another payload.', task);
    END IF;
    RETURN task;
END $$""",
)

DOWNGRADE = (
    "DROP FUNCTION ingest_submit",
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
