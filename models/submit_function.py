"""`ingest_submit`: the SQL lane of submitting, so that Django, Go or psql enqueue in their own transaction.

    SELECT ingest_submit('invoice.import', '{"invoice": 17}', 'invoice 17');

Same rules as `tasks/submit.py`: the id of a key is the same (P10), a key with another payload is refused with SQLSTATE
CL409, the first transition and the ring are written with the task. A type is not looked up: the database knows no
handlers. A task without a known handler waits, and `manage.py show` says so.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Table, event, text

from models.tasks import IngestTask

CONFLICT: Final = "CL409"

PAYLOAD_SHA: Final = """
CREATE FUNCTION ingest_payload_sha(payload jsonb) RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
RETURN encode(sha256(convert_to(CAST(payload AS text), 'UTF8')), 'hex')
"""

TASK_ID: Final = """
CREATE FUNCTION ingest_task_id(type text, key text) RETURNS uuid LANGUAGE plpgsql STABLE AS $$
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
END $$
"""

SUBMIT: Final = """
CREATE FUNCTION ingest_submit(type text, payload jsonb, key text DEFAULT NULL, queue text DEFAULT 'ingest',
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
END $$
"""


def create(connection: Connection) -> None:
    for statement in (PAYLOAD_SHA, TASK_ID, SUBMIT):
        connection.execute(text(statement))


@event.listens_for(IngestTask.__table__, "after_create")
def _create(_table: Table, connection: Connection, **_options: Any) -> None:
    create(connection)


@event.listens_for(IngestTask.__table__, "after_drop")
def _drop(_table: Table, connection: Connection, **_options: Any) -> None:
    for function in ("ingest_submit", "ingest_task_id", "ingest_payload_sha"):
        connection.execute(text(f"DROP FUNCTION {function}"))
