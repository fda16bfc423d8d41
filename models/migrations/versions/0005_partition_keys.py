"""Partition keys: who is first of a key, and a turn for each task of one; one index less for the history. The reasons
stand beside the models."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"

UPGRADE = (
    "CREATE SEQUENCE ingest_task_key_seq",
    'ALTER TABLE ingest_task ALTER COLUMN partition_key TYPE text COLLATE "C"',
    "DROP INDEX ix_ingest_task_due",
    """CREATE INDEX ix_ingest_task_due ON ingest_task (queue, type,
       (CASE WHEN partition_key IS NULL THEN coalesce(next_retry_at, '-infinity') ELSE 'infinity' END), id)
       WHERE status IN ('QUEUED', 'RETRYING')""",
    """CREATE INDEX ix_ingest_task_key ON ingest_task (partition_key, key_seq)
       WHERE partition_key IS NOT NULL AND status NOT IN ('SUCCEEDED', 'DISCARDED')""",
    "ALTER TABLE ingest_task_transition DROP CONSTRAINT pk_ingest_task_transition",
    "DROP INDEX ix_ingest_task_transition_task_id",
    "ALTER TABLE ingest_task_transition ADD CONSTRAINT pk_ingest_task_transition PRIMARY KEY (task_id, id)",
    "DROP FUNCTION ingest_submit",
    "DROP FUNCTION ingest_submit_task",
    """CREATE FUNCTION ingest_key_lock(partition_key text) RETURNS void LANGUAGE sql
RETURN pg_advisory_xact_lock(hashtextextended('celeriac key ' || partition_key, 0))""",
    """CREATE FUNCTION ingest_submit_task(
    task uuid, type text, payload jsonb, context jsonb, queue text, priority integer, key text, max_attempts integer,
    run_at timestamptz, delay_seconds double precision, notify text, actor text, batch integer,
    holder text, token uuid, lease_seconds double precision, partition_key text,
    OUT created boolean, OUT status text, OUT same boolean, OUT ring bigint, OUT stamp timestamptz
) LANGUAGE plpgsql AS $$
DECLARE
    due timestamptz;
    leased boolean;
    key_seq bigint;
BEGIN
    IF partition_key IS NOT NULL THEN
        PERFORM ingest_key_lock(partition_key);
        key_seq := nextval('ingest_task_key_seq');
    END IF;
    stamp := ledger_now();
    due := coalesce(run_at, stamp + make_interval(secs => delay_seconds));
    due := CASE WHEN due > stamp THEN due END;
    leased := due IS NULL AND token IS NOT NULL;
    INSERT INTO ingest_task (id, type, payload, context, queue, priority, idempotency_key, max_attempts,
                             next_retry_at, rung_at, notify, created_at, updated_at, partition_key, key_seq)
    VALUES (task, type, payload, context, queue, priority, key, max_attempts,
            due, coalesce(due, stamp), notify, stamp, stamp, partition_key, key_seq)
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
                              run_at timestamptz DEFAULT NULL, partition_key text DEFAULT NULL)
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
    ELSIF length(partition_key) NOT BETWEEN 1 AND 500 OR partition_key ~ '[\u0001-\u001f\u007f-\u009f]' THEN
        RAISE EXCEPTION USING ERRCODE = 'CL400',
            MESSAGE = 'A partition key is text of 1 to 500 characters without control characters.';
    ELSIF octet_length(CAST(payload AS text)) > 1048576 THEN
        RAISE EXCEPTION USING ERRCODE = 'CL413',
            MESSAGE = format('The payload has %s bytes, and 1048576 is the most.', octet_length(CAST(payload AS text)));
    END IF;
    SELECT * INTO answer FROM ingest_submit_task(
        task, type, payload, '{}', queue, 5, key, 10, run_at, NULL, NULL, current_user, 100, NULL, NULL, NULL,
        partition_key);
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
    "DROP FUNCTION ingest_key_lock",
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
    "ALTER TABLE ingest_task_transition DROP CONSTRAINT pk_ingest_task_transition",
    "ALTER TABLE ingest_task_transition ADD CONSTRAINT pk_ingest_task_transition PRIMARY KEY (id)",
    "CREATE INDEX ix_ingest_task_transition_task_id ON ingest_task_transition (task_id)",
    "DROP INDEX ix_ingest_task_key",
    "DROP INDEX ix_ingest_task_due",
    """CREATE INDEX ix_ingest_task_due ON ingest_task (queue, type, coalesce(next_retry_at, '-infinity'), id)
       WHERE status IN ('QUEUED', 'RETRYING')""",
    "ALTER TABLE ingest_task ALTER COLUMN partition_key TYPE text",
    "DROP SEQUENCE ingest_task_key_seq",
)


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
