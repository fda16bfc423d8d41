"""`ingest_submit`: the SQL lane of submitting, so that Django, Go or psql enqueue in their own transaction.

    SELECT ingest_submit('invoice.import', '{"invoice": 17}', 'invoice 17');

Same rules as Python's `submit`: the id of a key is the same (P10), the first transition and the ring are written with
the task. SQLSTATE CL409: the key belongs to a task with another payload. CL400: the type, the key, the time or the
payload cannot be used. CL413: the payload is too large. A type is not looked up: the database knows no handlers. A task
without a known handler waits, and `manage.py show` says so.

`ingest_submit_task` does the work, for this lane and for a single task of the other: the plans of a function are kept
with the connection, and planning would cost more than the three inserts.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Table, event, text

from models.tasks import IngestTask

CONFLICT: Final = "CL409"
BAD_TASK: Final = "CL400"
TOO_LARGE: Final = "CL413"

# Equal for payloads that are equal as jsonb: PostgreSQL writes those alike, but for zeros at the end of a fraction.
PAYLOAD_SHA: Final = r"""
CREATE FUNCTION ingest_payload_sha(payload jsonb) RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
RETURN encode(sha256(convert_to(regexp_replace(CAST(payload AS text),
    '("(?:[^"\\]|\\.)*")|(\.[0-9]*[1-9])0+(?![0-9])|\.0+(?![0-9])', '\1\2', 'g'), 'UTF8')), 'hex')
"""

# UUIDv8 of a key, as `tasks/core/task_ids.py` makes it.
TASK_ID: Final = """
CREATE FUNCTION ingest_task_id(type text, key text) RETURNS uuid LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
DECLARE
    raw bytea := substring(sha256(convert_to(type || chr(31) || key, 'UTF8')) FROM 1 FOR 16);
BEGIN
    raw := set_byte(raw, 6, (get_byte(raw, 6) & 15) | 128);
    RETURN CAST(encode(set_byte(raw, 8, (get_byte(raw, 8) & 63) | 128), 'hex') AS uuid);
END $$
"""

# UUIDv7: 48 bits of milliseconds, the rest at random.
FRESH_ID: Final = """
CREATE FUNCTION ingest_fresh_id() RETURNS uuid LANGUAGE plpgsql PARALLEL SAFE AS $$
DECLARE
    raw bytea := decode(lpad(to_hex(CAST(extract(epoch FROM ledger_now()) * 1000 AS bigint)), 12, '0'), 'hex')
                 || substring(uuid_send(gen_random_uuid()) FROM 7);
BEGIN
    RETURN CAST(encode(set_byte(raw, 6, (get_byte(raw, 6) & 15) | 112), 'hex') AS uuid);
END $$
"""

# Newborn tasks whose key is that of a pruned one are taken back. An INSERT that waited for the pruning did not see its
# tombstones; a volatile function looks anew. At REPEATABLE READ and above nothing does: whoever tries to put a stone
# where one is that it cannot see is told so (40001), and repeats its transaction.
GIVE_WAY: Final = """
CREATE FUNCTION ingest_give_way(ids uuid[]) RETURNS uuid[] LANGUAGE plpgsql AS $$
DECLARE
    gave_way uuid[];
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        INSERT INTO task_tombstone (id, status, payload_sha) SELECT unnest(ids), 'DISCARDED', ''
        ON CONFLICT (id) DO NOTHING;
        DELETE FROM task_tombstone WHERE id = ANY(ids) AND payload_sha = '';
    END IF;
    WITH gone AS (
        DELETE FROM ingest_task task USING task_tombstone stone
        WHERE stone.id = ANY(ids) AND task.id = stone.id RETURNING task.id)
    SELECT coalesce(array_agg(id), '{}') INTO gave_way FROM gone;
    RETURN gave_way;
END $$
"""

# Whoever submits to a partition key waits for the commit of whoever did before: key_seq is the order of commits (P9).
KEY_LOCK: Final = """
CREATE FUNCTION ingest_key_lock(partition_key text) RETURNS void LANGUAGE sql
RETURN pg_advisory_xact_lock(hashtextextended('celeriac key ' || partition_key, 0))
"""

# submit: → QUEUED, with its first transition and its ring, leased if it is due and a token is given; or what is there.
SUBMIT_TASK: Final = """
CREATE FUNCTION ingest_submit_task(
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
END $$
"""

# What Python refuses (`outbox/canonical.py`) or cannot read. It walks only through what could be wrong.
PAYLOAD_FAULT: Final = """
CREATE FUNCTION ingest_payload_fault(payload jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
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
END $$
"""

# The lane itself. It finds its tables from any search_path.
SUBMIT: Final = r"""
CREATE FUNCTION ingest_submit(type text, payload jsonb, key text DEFAULT NULL, queue text DEFAULT 'ingest',
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
END $$
"""

FUNCTIONS: Final = (PAYLOAD_SHA, TASK_ID, FRESH_ID, GIVE_WAY, KEY_LOCK, SUBMIT_TASK, PAYLOAD_FAULT, SUBMIT)
NAMES: Final = (
    "ingest_submit", "ingest_payload_fault", "ingest_submit_task", "ingest_key_lock", "ingest_give_way",
    "ingest_fresh_id", "ingest_task_id", "ingest_payload_sha",
)  # fmt: skip


def create(connection: Connection) -> None:
    for statement in FUNCTIONS:
        connection.execute(text(statement))


@event.listens_for(IngestTask.__table__, "after_create")
def _create(_table: Table, connection: Connection, **_options: Any) -> None:
    create(connection)


@event.listens_for(IngestTask.__table__, "after_drop")
def _drop(_table: Table, connection: Connection, **_options: Any) -> None:
    for function in NAMES:
        connection.execute(text(f"DROP FUNCTION {function}"))
