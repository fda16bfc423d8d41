"""What the SQL lane refuses as the other does, and how a tick ended; the reasons stand beside the models."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"

UPGRADE = (
    "ALTER TABLE tick ADD COLUMN error text",
    """CREATE FUNCTION ingest_payload_fault(payload jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    written text := CAST(payload AS text);
BEGIN
    IF length(written) - length(translate(written, '[{', '')) > 64 AND jsonb_path_exists(payload,
            'strict $.**{64 to last} ? (@.type() == "object" || @.type() == "array")') THEN
        RETURN 'The payload is nested more than 64 levels deep.';
    ELSIF length(written) - length(translate(written, ':', '')) > 10000 AND (
            SELECT count(*) FROM jsonb_path_query(payload, 'strict $.** ? (@.type() == "object").keyvalue()')
        ) > 10000 THEN
        RETURN 'The payload has more than 10,000 keys.';
    ELSIF length(written) > 4300 AND jsonb_path_exists(payload,
            'strict $.** ? (@.type() == "number" && @.abs() >= 1e4300)') THEN
        RETURN 'The payload has a number of more than 4,300 digits.';
    END IF;
    RETURN NULL;
END $$""",
    r"""CREATE OR REPLACE FUNCTION ingest_submit(type text, payload jsonb, key text DEFAULT NULL, queue text DEFAULT 'ingest',
                              run_at timestamptz DEFAULT NULL, partition_key text DEFAULT NULL)
RETURNS uuid LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    task uuid := CASE WHEN key IS NULL THEN ingest_fresh_id() ELSE ingest_task_id(type, key) END;
    fault text;
    answer record;
BEGIN
    payload := coalesce(payload, 'null');
    queue := coalesce(queue, 'ingest');
    fault := ingest_payload_fault(payload);
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
    ELSIF fault IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'CL400', MESSAGE = fault;
    ELSIF run_at > '9000-01-01 00:00+00' THEN
        RAISE EXCEPTION USING ERRCODE = 'CL400', MESSAGE = 'run_at is more than a thousand years away.';
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
    r"""CREATE OR REPLACE FUNCTION ingest_submit(type text, payload jsonb, key text DEFAULT NULL, queue text DEFAULT 'ingest',
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
    "DROP FUNCTION ingest_payload_fault",
    "ALTER TABLE tick DROP COLUMN error",
)


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
