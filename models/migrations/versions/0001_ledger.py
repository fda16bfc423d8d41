"""The ledger: its clock, the tasks, the outbox, the sinks, documents, chats, and what steers them.

A migration is history: it says what was done in literals and imports nothing that may change. Why a table, a CHECK or an
index is as it is stands beside its model.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

CLOCK = """
CREATE TABLE ledger_clock (
    only_row boolean NOT NULL DEFAULT true,
    shift interval NOT NULL DEFAULT '0',
    CONSTRAINT pk_ledger_clock PRIMARY KEY (only_row),
    CONSTRAINT ck_ledger_clock_only_row CHECK (only_row)
);

CREATE FUNCTION ledger_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
RETURN clock_timestamp() + coalesce((SELECT shift FROM ledger_clock), interval '0');

CREATE FUNCTION ledger_clock_guard() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = 'only a superuser (a test) may move the clock of the ledger; ' || current_user || ' is none';
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER ledger_clock_guard BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON ledger_clock
FOR EACH STATEMENT EXECUTE FUNCTION ledger_clock_guard();
"""

TASKS = """
CREATE TABLE ingest_task (
    id uuid NOT NULL,
    type text NOT NULL,
    payload jsonb NOT NULL,
    context jsonb NOT NULL DEFAULT '{}',
    queue text NOT NULL DEFAULT 'ingest',
    priority smallint NOT NULL DEFAULT 5,
    partition_key text,
    key_seq bigint,
    idempotency_key text,
    status text NOT NULL DEFAULT 'QUEUED',
    attempt_count integer NOT NULL DEFAULT 0,
    max_attempts integer NOT NULL DEFAULT 10,
    next_retry_at timestamptz,
    rung_at timestamptz,
    lease_token uuid,
    isolated boolean NOT NULL DEFAULT false,
    last_error text,
    error_message text,
    error_code text,
    result jsonb,
    notify text,
    created_at timestamptz NOT NULL DEFAULT ledger_now(),
    updated_at timestamptz NOT NULL DEFAULT ledger_now(),
    finished_at timestamptz,
    CONSTRAINT pk_ingest_task PRIMARY KEY (id),
    CONSTRAINT ck_ingest_task_status CHECK (status IN ('QUEUED', 'RUNNING', 'RETRYING', 'SUCCEEDED', 'DEAD', 'DISCARDED')),
    CONSTRAINT ck_ingest_task_running_is_leased CHECK ((status = 'RUNNING') = (lease_token IS NOT NULL)),
    CONSTRAINT ck_ingest_task_final_is_finished CHECK ((status IN ('SUCCEEDED', 'DEAD', 'DISCARDED')) = (finished_at IS NOT NULL)),
    CONSTRAINT ck_ingest_task_next_retry_at CHECK (
        CASE status
            WHEN 'RETRYING' THEN next_retry_at IS NOT NULL
            WHEN 'SUCCEEDED' THEN next_retry_at IS NULL
            WHEN 'DEAD' THEN next_retry_at IS NULL
            ELSE true
        END),
    CONSTRAINT ck_ingest_task_priority CHECK (priority BETWEEN 0 AND 9),
    CONSTRAINT ck_ingest_task_attempt_count CHECK (attempt_count >= 0),
    CONSTRAINT ck_ingest_task_max_attempts CHECK (max_attempts >= 1),
    CONSTRAINT ck_ingest_task_partition_key CHECK ((partition_key IS NULL) = (key_seq IS NULL)),
    CONSTRAINT ck_ingest_task_error_together CHECK ((last_error IS NULL) = (error_message IS NULL)),
    CONSTRAINT ck_ingest_task_last_error CHECK (length(last_error) <= 4000),
    CONSTRAINT ck_ingest_task_error_message CHECK (length(error_message) <= 500)
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ix_ingest_task_due ON ingest_task (queue, type, coalesce(next_retry_at, '-infinity'))
    WHERE status IN ('QUEUED', 'RETRYING');
CREATE INDEX ix_ingest_task_dead ON ingest_task (finished_at, id) WHERE status = 'DEAD';

CREATE TABLE ingest_task_transition (
    id bigint GENERATED ALWAYS AS IDENTITY,
    task_id uuid NOT NULL,
    from_status text,
    to_status text NOT NULL,
    attempt_count integer NOT NULL DEFAULT 0,
    message text,
    actor text NOT NULL DEFAULT CURRENT_USER,
    created_at timestamptz NOT NULL DEFAULT ledger_now(),
    CONSTRAINT pk_ingest_task_transition PRIMARY KEY (id),
    CONSTRAINT ck_ingest_task_transition_way CHECK (
        CASE
            WHEN from_status IS NULL THEN to_status IN ('QUEUED')
            WHEN from_status = 'QUEUED' THEN to_status IN ('DISCARDED', 'RUNNING')
            WHEN from_status = 'RETRYING' THEN to_status IN ('DISCARDED', 'RUNNING')
            WHEN from_status = 'RUNNING' THEN to_status IN ('DEAD', 'DISCARDED', 'QUEUED', 'RETRYING', 'SUCCEEDED')
            WHEN from_status = 'DEAD' THEN to_status IN ('DISCARDED', 'QUEUED')
            ELSE false
        END),
    CONSTRAINT ck_ingest_task_transition_attempt_count CHECK (attempt_count >= 0)
);
CREATE INDEX ix_ingest_task_transition_task_id ON ingest_task_transition (task_id);

CREATE TABLE task_lease (
    token uuid NOT NULL,
    holder text NOT NULL,
    lease_until timestamptz NOT NULL,
    task_ids uuid[] NOT NULL,
    type text NOT NULL,
    queue text NOT NULL,
    priority smallint NOT NULL,
    claimed_at timestamptz NOT NULL DEFAULT ledger_now(),
    CONSTRAINT pk_task_lease PRIMARY KEY (token),
    CONSTRAINT ck_task_lease_priority CHECK (priority BETWEEN 0 AND 9)
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE task_audit (
    id bigint GENERATED ALWAYS AS IDENTITY,
    task_id uuid NOT NULL,
    code text NOT NULL,
    worker_id text NOT NULL,
    detail text,
    created_at timestamptz NOT NULL DEFAULT ledger_now(),
    CONSTRAINT pk_task_audit PRIMARY KEY (id)
);
CREATE INDEX ix_task_audit_task_id ON task_audit (task_id);

CREATE TABLE task_step (
    task_id uuid NOT NULL,
    name text NOT NULL,
    result jsonb,
    created_at timestamptz NOT NULL DEFAULT ledger_now(),
    CONSTRAINT pk_task_step PRIMARY KEY (task_id, name)
);
"""

OUTBOX = """
CREATE TABLE outbox_event (
    id bigint GENERATED BY DEFAULT AS IDENTITY,
    destination text NOT NULL,
    payload jsonb NOT NULL,
    payload_sha text,
    headers jsonb NOT NULL DEFAULT '{}',
    ordering_key text,
    status text NOT NULL DEFAULT 'NEW',
    attempt_count integer NOT NULL DEFAULT 0,
    next_retry_at timestamptz,
    locked_by text,
    locked_at timestamptz,
    lease_token uuid,
    lease_until timestamptz,
    last_error text,
    external_id text,
    created_at timestamptz NOT NULL DEFAULT ledger_now(),
    sent_at timestamptz,
    CONSTRAINT pk_outbox_event PRIMARY KEY (id),
    CONSTRAINT ck_outbox_event_status CHECK (status IN ('NEW', 'RETRYING', 'SENT', 'DEAD')),
    CONSTRAINT ck_outbox_event_sent_has_a_time CHECK ((status = 'SENT') = (sent_at IS NOT NULL)),
    CONSTRAINT ck_outbox_event_lease CHECK ((lease_token IS NULL) = (lease_until IS NULL)),
    CONSTRAINT ck_outbox_event_final_holds_no_lease CHECK (status IN ('NEW', 'RETRYING') OR lease_token IS NULL),
    CONSTRAINT ck_outbox_event_attempt_count CHECK (attempt_count >= 0)
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ix_outbox_event_unsent ON outbox_event (coalesce(next_retry_at, '-infinity'), id)
    WHERE status IN ('NEW', 'RETRYING');
CREATE INDEX ix_outbox_event_dedup ON outbox_event (destination, payload_sha)
    WHERE status = 'SENT' AND payload_sha IS NOT NULL;

CREATE TABLE outbox_audit (
    id bigint GENERATED ALWAYS AS IDENTITY,
    outbox_id bigint,
    code text NOT NULL,
    worker_id text NOT NULL,
    detail text,
    created_at timestamptz NOT NULL DEFAULT ledger_now(),
    CONSTRAINT pk_outbox_audit PRIMARY KEY (id)
);
CREATE INDEX ix_outbox_audit_outbox_id ON outbox_audit (outbox_id);
"""

SINKS = """
CREATE TABLE sink_transaction (
    gid text NOT NULL,
    task_id uuid,
    checkpoint_id bigint,
    sink text NOT NULL,
    handle jsonb NOT NULL DEFAULT '{}',
    lease_token uuid,
    decision text,
    state text NOT NULL DEFAULT 'open',
    created_at timestamptz NOT NULL DEFAULT ledger_now(),
    decided_at timestamptz,
    CONSTRAINT pk_sink_transaction PRIMARY KEY (gid),
    CONSTRAINT ck_sink_transaction_gid CHECK (octet_length(gid) BETWEEN 1 AND 199),
    CONSTRAINT ck_sink_transaction_has_an_origin CHECK (num_nonnulls(task_id, checkpoint_id) >= 1),
    CONSTRAINT ck_sink_transaction_decision CHECK (decision IN ('commit', 'abort')),
    CONSTRAINT ck_sink_transaction_state CHECK (state IN ('open', 'prepared', 'committed', 'aborted', 'failed')),
    CONSTRAINT ck_sink_transaction_decision_has_a_time CHECK ((decision IS NULL) = (decided_at IS NULL)),
    CONSTRAINT ck_sink_transaction_state_follows_decision CHECK (
        CASE state
            WHEN 'committed' THEN decision IS NOT DISTINCT FROM 'commit'
            WHEN 'aborted' THEN decision IS NOT DISTINCT FROM 'abort'
            ELSE true
        END)
);
CREATE INDEX ix_sink_transaction_task_id ON sink_transaction (task_id);
CREATE INDEX ix_sink_transaction_unfinished ON sink_transaction (created_at) WHERE state NOT IN ('committed', 'aborted');
"""

DOCUMENTS = """
CREATE TABLE document (
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    name text NOT NULL,
    media_type text NOT NULL,
    sha256 bytea NOT NULL,
    content bytea NOT NULL,
    size_bytes bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT ledger_now(),
    updated_at timestamptz NOT NULL DEFAULT ledger_now(),
    CONSTRAINT pk_document PRIMARY KEY (id),
    CONSTRAINT ck_document_sha256 CHECK (octet_length(sha256) = 32),
    CONSTRAINT ck_document_size_bytes CHECK (size_bytes = octet_length(content))
);

CREATE TABLE document_chunk (
    document_id uuid NOT NULL,
    position integer NOT NULL,
    text text NOT NULL,
    words tsvector NOT NULL GENERATED ALWAYS AS (to_tsvector('simple'::regconfig, text)) STORED,
    CONSTRAINT pk_document_chunk PRIMARY KEY (document_id, position),
    CONSTRAINT ck_document_chunk_position CHECK (position >= 0),
    CONSTRAINT fk_document_chunk_document_id FOREIGN KEY (document_id) REFERENCES document (id) ON DELETE CASCADE
);
CREATE INDEX ix_document_chunk_words ON document_chunk USING gin (words);
"""

CHATS = """
CREATE TABLE chat (
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    first_user_id text NOT NULL,
    second_user_id text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT ledger_now(),
    CONSTRAINT pk_chat PRIMARY KEY (id),
    CONSTRAINT uq_chat_first_user_id_second_user_id UNIQUE (first_user_id, second_user_id),
    CONSTRAINT ck_chat_user_order CHECK (first_user_id COLLATE "C" <= second_user_id COLLATE "C")
);

CREATE TABLE chat_member (
    chat_id uuid NOT NULL,
    user_id text NOT NULL,
    read_until_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT ledger_now(),
    CONSTRAINT pk_chat_member PRIMARY KEY (chat_id, user_id),
    CONSTRAINT fk_chat_member_chat_id FOREIGN KEY (chat_id) REFERENCES chat (id) ON DELETE CASCADE
);
CREATE INDEX ix_chat_member_user_id ON chat_member (user_id);

CREATE TABLE chat_message (
    id uuid NOT NULL,
    chat_id uuid NOT NULL,
    client_msg_id text NOT NULL,
    from_user_id text NOT NULL,
    to_user_id text NOT NULL,
    msg_type text NOT NULL DEFAULT 'text',
    body text NOT NULL,
    producer_server_id text,
    sent_at timestamptz,
    accepted_at timestamptz NOT NULL DEFAULT ledger_now(),
    saved_at timestamptz NOT NULL DEFAULT ledger_now(),
    CONSTRAINT pk_chat_message PRIMARY KEY (id),
    CONSTRAINT uq_chat_message_from_user_id_client_msg_id UNIQUE (from_user_id, client_msg_id),
    CONSTRAINT fk_chat_message_chat_id FOREIGN KEY (chat_id) REFERENCES chat (id) ON DELETE CASCADE
);
CREATE INDEX ix_chat_message_history ON chat_message (chat_id, accepted_at, id);
"""

CONTROL = """
CREATE TABLE checkpoint (
    id bigint GENERATED ALWAYS AS IDENTITY,
    stream text NOT NULL,
    shard integer NOT NULL DEFAULT 0,
    offsets jsonb NOT NULL DEFAULT '{}',
    state jsonb NOT NULL DEFAULT '{}',
    sink_committed boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT ledger_now(),
    completed_at timestamptz,
    CONSTRAINT pk_checkpoint PRIMARY KEY (id),
    CONSTRAINT ck_checkpoint_shard CHECK (shard >= 0)
);
CREATE INDEX ix_checkpoint_newest ON checkpoint (stream, shard, id);

CREATE TABLE shard_lease (
    stream text NOT NULL,
    shard integer NOT NULL,
    holder text,
    lease_token uuid,
    lease_until timestamptz,
    CONSTRAINT pk_shard_lease PRIMARY KEY (stream, shard),
    CONSTRAINT ck_shard_lease_shard CHECK (shard >= 0),
    CONSTRAINT ck_shard_lease_lease CHECK ((lease_token IS NULL) = (lease_until IS NULL) AND (lease_token IS NULL OR holder IS NOT NULL))
);

CREATE TABLE tick (
    name text NOT NULL,
    holder text,
    lease_token uuid,
    lease_until timestamptz,
    started_at timestamptz,
    finished_at timestamptz,
    CONSTRAINT pk_tick PRIMARY KEY (name),
    CONSTRAINT ck_tick_lease CHECK ((lease_token IS NULL) = (lease_until IS NULL) AND (lease_token IS NULL OR holder IS NOT NULL))
);

CREATE TABLE queue_pause (
    queue text NOT NULL,
    reason text,
    actor text NOT NULL DEFAULT CURRENT_USER,
    created_at timestamptz NOT NULL DEFAULT ledger_now(),
    CONSTRAINT pk_queue_pause PRIMARY KEY (queue)
);

CREATE TABLE queue_limit (
    queue text NOT NULL,
    max_running integer NOT NULL,
    CONSTRAINT pk_queue_limit PRIMARY KEY (queue),
    CONSTRAINT ck_queue_limit_max_running CHECK (max_running >= 0)
);

CREATE TABLE api_token (
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    name text NOT NULL,
    token_sha256 bytea NOT NULL,
    scopes text[] NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT ledger_now(),
    expires_at timestamptz,
    revoked_at timestamptz,
    last_used_at timestamptz,
    CONSTRAINT pk_api_token PRIMARY KEY (id),
    CONSTRAINT uq_api_token_name UNIQUE (name),
    CONSTRAINT uq_api_token_token_sha256 UNIQUE (token_sha256),
    CONSTRAINT ck_api_token_token_sha256 CHECK (octet_length(token_sha256) = 32)
);
"""

EVERYTHING_BUT_THE_CLOCK = """
DROP TABLE api_token, queue_limit, queue_pause, tick, shard_lease, checkpoint,
    chat_message, chat_member, chat, document_chunk, document, sink_transaction, outbox_audit, outbox_event,
    task_step, task_audit, task_lease, ingest_task_transition, ingest_task;
"""

THE_CLOCK = """
DROP FUNCTION ledger_now();
DROP TABLE ledger_clock;
DROP FUNCTION ledger_clock_guard();
"""


def upgrade() -> None:
    for part in (CLOCK, TASKS, OUTBOX, SINKS, DOCUMENTS, CHATS, CONTROL):
        op.execute(part)


def downgrade() -> None:
    op.execute(EVERYTHING_BUT_THE_CLOCK)
    op.execute(THE_CLOCK)
