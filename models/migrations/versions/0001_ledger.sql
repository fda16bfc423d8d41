-- The ledger. `ledger.` stands for the schema of the installation (LEDGER_SCHEMA). Every name is qualified, so that the
-- functions work with any search_path of the caller.
--
-- The life of a task: submitting inserts it into ingest_task (QUEUED), with its first row in ingest_task_transition and
-- its wake-up in outbox_event. A worker claims it: RUNNING, with the token of a row in task_lease. Settling writes the
-- outcome under that token: SUCCEEDED, RETRYING with a wake-up for later, DEAD, or DISCARDED. Pruning deletes old
-- finished tasks; a task that had an idempotency key leaves a row in task_tombstone.

-- The clock: clock_timestamp() plus a shift that only tests set.

CREATE TABLE ledger.ledger_clock (
    only_row boolean NOT NULL DEFAULT true,
    shift interval NOT NULL DEFAULT '0',
    CONSTRAINT pk_ledger_clock PRIMARY KEY (only_row),
    CONSTRAINT ck_ledger_clock_only_row CHECK (only_row)
);

CREATE FUNCTION ledger.ledger_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
RETURN clock_timestamp() + coalesce((SELECT shift FROM ledger.ledger_clock), interval '0');

CREATE FUNCTION ledger.ledger_clock_guard() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = 'Only a superuser (a test) may move the clock of the ledger; ' || current_user || ' is not one.';
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER ledger_clock_guard BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON ledger.ledger_clock
FOR EACH STATEMENT EXECUTE FUNCTION ledger.ledger_clock_guard();

-- Tasks.

CREATE SEQUENCE ledger.ingest_task_key_seq;

CREATE TABLE ledger.ingest_task (
    id uuid NOT NULL,
    type text NOT NULL,
    payload jsonb NOT NULL,
    context jsonb NOT NULL DEFAULT '{}',
    queue text NOT NULL DEFAULT 'ingest',
    priority smallint NOT NULL DEFAULT 5,
    partition_key text COLLATE "C",
    key_seq bigint,
    idempotency_key text,
    status text NOT NULL DEFAULT 'QUEUED',
    attempt_count integer NOT NULL DEFAULT 0,
    max_attempts integer NOT NULL DEFAULT 10,
    next_retry_at timestamptz,
    last_wakeup_at timestamptz,
    lease_token uuid,
    isolated boolean NOT NULL DEFAULT false,
    limit_key text COLLATE "C",
    limited_at timestamptz,
    expires_at timestamptz,
    last_error text,
    error_message text,
    error_code text,
    error_fingerprint text,
    result jsonb,
    notify text,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    updated_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
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
    CONSTRAINT ck_ingest_task_limited_waits CHECK (
        limited_at IS NULL OR (limit_key IS NOT NULL AND status IN ('QUEUED', 'RETRYING', 'DISCARDED'))),
    CONSTRAINT ck_ingest_task_expires_before_start CHECK (expires_at IS NULL OR status IN ('QUEUED', 'DISCARDED')),
    CONSTRAINT ck_ingest_task_partition_key CHECK ((partition_key IS NULL) = (key_seq IS NULL)),
    CONSTRAINT ck_ingest_task_error_together CHECK ((last_error IS NULL) = (error_message IS NULL)),
    CONSTRAINT ck_ingest_task_last_error CHECK (length(last_error) <= 4000),
    CONSTRAINT ck_ingest_task_error_message CHECK (length(error_message) <= 500)
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ix_ingest_task_due ON ledger.ingest_task (queue, type,
    (CASE WHEN partition_key IS NULL AND limited_at IS NULL THEN coalesce(next_retry_at, '-infinity') ELSE 'infinity' END),
    id)
    WHERE status IN ('QUEUED', 'RETRYING');
CREATE INDEX ix_ingest_task_key ON ledger.ingest_task (partition_key, key_seq)
    WHERE partition_key IS NOT NULL AND status NOT IN ('SUCCEEDED', 'DISCARDED');
CREATE INDEX ix_ingest_task_limited ON ledger.ingest_task (type, limit_key, priority DESC, limited_at, id)
    WHERE limited_at IS NOT NULL AND status IN ('QUEUED', 'RETRYING');
CREATE INDEX ix_ingest_task_expires ON ledger.ingest_task (expires_at) WHERE expires_at IS NOT NULL AND status = 'QUEUED';
CREATE INDEX ix_ingest_task_running ON ledger.ingest_task (type, limit_key)
    WHERE limit_key IS NOT NULL AND status = 'RUNNING';
CREATE INDEX ix_ingest_task_dead ON ledger.ingest_task (finished_at, id) WHERE status = 'DEAD';
CREATE INDEX ix_ingest_task_dead_errors ON ledger.ingest_task (type, error_fingerprint, finished_at) WHERE status = 'DEAD';
CREATE INDEX ix_ingest_task_open ON ledger.ingest_task (updated_at) WHERE status IN ('QUEUED', 'RETRYING');
CREATE INDEX ix_ingest_task_principal ON ledger.ingest_task
    ((context ->> 'principal'), coalesce(finished_at, updated_at), id)
    WHERE context ->> 'principal' IS NOT NULL AND status <> 'RUNNING';
CREATE INDEX ix_ingest_task_done ON ledger.ingest_task (finished_at) WHERE status IN ('SUCCEEDED', 'DISCARDED');
CREATE INDEX ix_ingest_task_retrying ON ledger.ingest_task (updated_at, id) WHERE status = 'RETRYING';
CREATE INDEX ix_ingest_task_discarded ON ledger.ingest_task (finished_at, id) WHERE status = 'DISCARDED';

CREATE TABLE ledger.ingest_task_transition (
    id bigint GENERATED ALWAYS AS IDENTITY,
    task_id uuid NOT NULL,
    from_status text,
    to_status text NOT NULL,
    attempt_count integer NOT NULL DEFAULT 0,
    message text,
    actor text NOT NULL DEFAULT CURRENT_USER,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_ingest_task_transition PRIMARY KEY (task_id, id),
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

CREATE TABLE ledger.task_lease (
    token uuid NOT NULL,
    holder text NOT NULL,
    lease_until timestamptz NOT NULL,
    task_ids uuid[] NOT NULL,
    type text NOT NULL,
    queue text NOT NULL,
    priority smallint NOT NULL,
    claimed_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    last_wakeup_at timestamptz,
    is_extended boolean NOT NULL DEFAULT false,
    reason text,
    CONSTRAINT pk_task_lease PRIMARY KEY (token),
    CONSTRAINT ck_task_lease_priority CHECK (priority BETWEEN 0 AND 9)
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE ledger.wakeup_horizon (
    queue text NOT NULL,
    priority smallint NOT NULL,
    seen_wakeup_at timestamptz NOT NULL,
    seen_at timestamptz NOT NULL,
    passed_wakeup_at timestamptz,
    CONSTRAINT pk_wakeup_horizon PRIMARY KEY (queue, priority)
);

CREATE TABLE ledger.task_audit (
    id bigint GENERATED ALWAYS AS IDENTITY,
    task_id uuid NOT NULL,
    code text NOT NULL,
    worker_id text NOT NULL,
    detail text,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_task_audit PRIMARY KEY (id)
);
CREATE INDEX ix_task_audit_task_id ON ledger.task_audit (task_id);
CREATE INDEX ix_task_audit_refused ON ledger.task_audit (id) WHERE code IN ('late_success', 'lease_lost');

CREATE TABLE ledger.task_tombstone (
    id uuid NOT NULL,
    status text NOT NULL,
    payload_sha text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_task_tombstone PRIMARY KEY (id)
);
CREATE INDEX ix_task_tombstone_created_at ON ledger.task_tombstone (created_at);

CREATE TABLE ledger.task_step (
    task_id uuid NOT NULL,
    name text NOT NULL,
    result jsonb,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_task_step PRIMARY KEY (task_id, name)
);

-- What workers register when they start: their handlers, their queues, themselves with a sign of life, and schedules.

CREATE TABLE ledger.task_type (
    type text NOT NULL,
    queue text NOT NULL,
    max_attempts integer NOT NULL,
    batch integer NOT NULL,
    priority smallint NOT NULL,
    max_running integer,
    rate text,
    limit_by text,
    seen_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_task_type PRIMARY KEY (type),
    CONSTRAINT ck_task_type_max_attempts CHECK (max_attempts >= 1),
    CONSTRAINT ck_task_type_batch CHECK (batch >= 1),
    CONSTRAINT ck_task_type_priority CHECK (priority BETWEEN 0 AND 9)
);

CREATE TABLE ledger.task_limit (
    type text NOT NULL,
    limit_key text COLLATE "C" NOT NULL,
    tokens double precision NOT NULL,
    refilled_at timestamptz NOT NULL,
    CONSTRAINT pk_task_limit PRIMARY KEY (type, limit_key)
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE ledger.task_queue (
    queue text NOT NULL,
    max_attempts integer NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_task_queue PRIMARY KEY (queue),
    CONSTRAINT ck_task_queue_max_attempts CHECK (max_attempts >= 1)
);

CREATE TABLE ledger.task_worker (
    worker text NOT NULL,
    queues text[] NOT NULL,
    types text[] NOT NULL,
    processes integer,
    topic text,
    version text,
    started_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    seen_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_task_worker PRIMARY KEY (worker)
);

CREATE TABLE ledger.schedule (
    name text NOT NULL,
    type text NOT NULL,
    rule text NOT NULL,
    timezone text NOT NULL,
    catch_up text NOT NULL,
    payload jsonb NOT NULL DEFAULT '{}',
    next_at timestamptz,
    last_at timestamptz,
    paused boolean NOT NULL DEFAULT false,
    paused_by text,
    paused_reason text,
    paused_at timestamptz,
    error text,
    declared_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_schedule PRIMARY KEY (name),
    CONSTRAINT ck_schedule_catch_up CHECK (catch_up IN ('once', 'all', 'none')),
    CONSTRAINT ck_schedule_moves_forward CHECK (next_at > last_at),
    CONSTRAINT ck_schedule_paused_by_an_operator CHECK (paused = (paused_at IS NOT NULL) AND paused = (paused_by IS NOT NULL))
);
CREATE INDEX ix_schedule_due ON ledger.schedule (next_at) WHERE NOT paused;

-- What operators do to all tasks that match a search.

CREATE TABLE ledger.bulk_action (
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    action text NOT NULL,
    query text NOT NULL,
    filter jsonb NOT NULL,
    as_of timestamptz NOT NULL,
    reason text NOT NULL,
    actor text NOT NULL DEFAULT CURRENT_USER,
    per_second double precision,
    canary integer,
    canary_seconds integer,
    canary_ids uuid[],
    canary_statuses jsonb,
    reset_steps boolean NOT NULL DEFAULT false,
    accept_duplicates boolean NOT NULL DEFAULT false,
    state text NOT NULL DEFAULT 'waiting',
    matched bigint,
    left_out bigint,
    changed bigint NOT NULL DEFAULT 0,
    sample uuid[] NOT NULL DEFAULT '{}',
    message text,
    token uuid,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    started_at timestamptz,
    seen_at timestamptz,
    finished_at timestamptz,
    CONSTRAINT pk_bulk_action PRIMARY KEY (id),
    CONSTRAINT ck_bulk_action_action CHECK (action IN ('requeue', 'discard', 'run-now')),
    CONSTRAINT ck_bulk_action_state CHECK (state IN ('waiting', 'running', 'done', 'stopped', 'canary failed')),
    CONSTRAINT ck_bulk_action_running_is_claimed CHECK ((state = 'running') = (token IS NOT NULL)),
    CONSTRAINT ck_bulk_action_ended_is_finished CHECK (
        (state IN ('done', 'stopped', 'canary failed')) = (finished_at IS NOT NULL)),
    CONSTRAINT ck_bulk_action_per_second CHECK (per_second > 0),
    CONSTRAINT ck_bulk_action_canary CHECK (canary >= 1),
    CONSTRAINT ck_bulk_action_canary_seconds CHECK ((canary IS NULL) = (canary_seconds IS NULL)),
    CONSTRAINT ck_bulk_action_changed CHECK (changed >= 0)
);
CREATE INDEX ix_bulk_action_created_at ON ledger.bulk_action (created_at, id);
CREATE INDEX ix_bulk_action_waiting ON ledger.bulk_action (created_at, id) WHERE state = 'waiting';

-- The outbox.

CREATE TABLE ledger.outbox_event (
    id bigint GENERATED BY DEFAULT AS IDENTITY,
    destination text NOT NULL,
    payload jsonb NOT NULL,
    payload_sha text,
    headers jsonb NOT NULL DEFAULT '{}',
    ordering_key text COLLATE "C",
    status text NOT NULL DEFAULT 'NEW',
    attempt_count integer NOT NULL DEFAULT 0,
    next_retry_at timestamptz,
    locked_by text,
    locked_at timestamptz,
    lease_token uuid,
    lease_until timestamptz,
    last_error text,
    external_id text,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    sent_at timestamptz,
    dedup_key text,
    CONSTRAINT pk_outbox_event PRIMARY KEY (id),
    CONSTRAINT ck_outbox_event_status CHECK (status IN ('NEW', 'RETRYING', 'SENT', 'DEAD')),
    CONSTRAINT ck_outbox_event_sent_has_a_time CHECK ((status = 'SENT') = (sent_at IS NOT NULL)),
    CONSTRAINT ck_outbox_event_lease CHECK ((lease_token IS NULL) = (lease_until IS NULL)),
    CONSTRAINT ck_outbox_event_final_holds_no_lease CHECK (status IN ('NEW', 'RETRYING') OR lease_token IS NULL),
    CONSTRAINT ck_outbox_event_attempt_count CHECK (attempt_count >= 0)
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX ix_outbox_event_unsent ON ledger.outbox_event (destination, coalesce(next_retry_at, '-infinity'), id)
    WHERE status IN ('NEW', 'RETRYING') AND ordering_key IS NULL;
CREATE INDEX ix_outbox_event_ordered ON ledger.outbox_event (destination, ordering_key, id)
    WHERE ordering_key IS NOT NULL AND status <> 'SENT';
CREATE INDEX ix_outbox_event_unreachable ON ledger.outbox_event (destination, status)
    WHERE status IN ('RETRYING', 'DEAD') AND last_error LIKE 'unreachable: %';
CREATE INDEX ix_outbox_event_dedup ON ledger.outbox_event (destination, coalesce(dedup_key, payload_sha))
    WHERE status = 'SENT' AND coalesce(dedup_key, payload_sha) IS NOT NULL;
CREATE INDEX ix_outbox_event_sent ON ledger.outbox_event (sent_at) WHERE status = 'SENT';
CREATE INDEX ix_outbox_event_dead ON ledger.outbox_event (id) WHERE status = 'DEAD';
CREATE INDEX ix_outbox_event_dead_wakeups ON ledger.outbox_event USING gin ((payload -> 'ids'))
    WHERE status = 'DEAD' AND destination LIKE 'celery:%';

-- A transaction that inserts an event with an ordering key waits for the commit of the previous one with that key, and
-- draws the id afterwards. So ids within a key follow the order of commits, also for plain INSERTs. The lock depends on
-- the oid of the table, so that two installations in one database do not wait for each other.
CREATE FUNCTION ledger.outbox_event_in_turn() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(
        hashtextextended(NEW.destination || chr(31) || NEW.ordering_key, CAST(TG_RELID AS bigint)));
    NEW.id := nextval(pg_get_serial_sequence(format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME), 'id'));
    RETURN NEW;
END $$;

CREATE TRIGGER outbox_event_in_turn BEFORE INSERT ON ledger.outbox_event
FOR EACH ROW WHEN (NEW.ordering_key IS NOT NULL) EXECUTE FUNCTION ledger.outbox_event_in_turn();

-- The canonical text of JSON, as `outbox/canonical_json.py` hashes it: keys in the order of their code points, no spaces,
-- numbers without an exponent and without needless zeros at the end of a fraction. NULL if it is nested more than 64
-- levels deep, which Python refuses and which would exhaust the stack here. MATERIALIZED, because the planner would
-- otherwise call the function twice for each member, and so 2^64 times for 64 levels.
CREATE FUNCTION ledger.outbox_canonical_json(given jsonb, depth integer DEFAULT 1) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    kind text := jsonb_typeof(given);
    zeros text := '^(-?[0-9]+\.(?:0|[0-9]*[1-9]))0+$';
BEGIN
    IF kind = 'object' AND depth <= 64 THEN
        RETURN (
            WITH member AS MATERIALIZED (
                SELECT key COLLATE "C" AS key,
                       CASE WHEN jsonb_typeof(value) IN ('object', 'array')
                            THEN ledger.outbox_canonical_json(value, depth + 1)
                            ELSE regexp_replace(CAST(value AS text), zeros, '\1') END AS written
                FROM jsonb_each(given))
            SELECT CASE WHEN count(*) = count(written) THEN
                '{' || coalesce(string_agg(CAST(to_json(key) AS text) || ':' || written, ',' ORDER BY key), '') || '}' END
            FROM member);
    ELSIF kind = 'array' AND depth <= 64 THEN
        RETURN (
            WITH member AS MATERIALIZED (
                SELECT place, CASE WHEN jsonb_typeof(value) IN ('object', 'array')
                                   THEN ledger.outbox_canonical_json(value, depth + 1)
                                   ELSE regexp_replace(CAST(value AS text), zeros, '\1') END AS written
                FROM jsonb_array_elements(given) WITH ORDINALITY AS element(value, place))
            SELECT CASE WHEN count(*) = count(written) THEN
                '[' || coalesce(string_agg(written, ',' ORDER BY place), '') || ']' END
            FROM member);
    END IF;
    RETURN CASE WHEN kind NOT IN ('object', 'array') THEN regexp_replace(CAST(given AS text), zeros, '\1') END;
END $$;

-- An event that is inserted without a hash gets it here. Wake-ups have none: they are never duplicates.
CREATE FUNCTION ledger.outbox_event_payload_sha() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.payload_sha := encode(sha256(convert_to(ledger.outbox_canonical_json(NEW.payload), 'UTF8')), 'hex');
    RETURN NEW;
END $$;

CREATE TRIGGER outbox_event_payload_sha BEFORE INSERT ON ledger.outbox_event
FOR EACH ROW WHEN (NEW.payload_sha IS NULL AND NOT starts_with(NEW.destination, 'celery:'))
EXECUTE FUNCTION ledger.outbox_event_payload_sha();

CREATE TABLE ledger.outbox_audit (
    id bigint GENERATED ALWAYS AS IDENTITY,
    outbox_id bigint,
    code text NOT NULL,
    worker_id text NOT NULL,
    detail text,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_outbox_audit PRIMARY KEY (id)
);
CREATE INDEX ix_outbox_audit_outbox_id ON ledger.outbox_audit (outbox_id);
CREATE INDEX ix_outbox_audit_refused ON ledger.outbox_audit (id) WHERE code = 'outbox_flush_conflict';

-- Sinks: transactions in other systems.

CREATE TABLE ledger.sink_transaction (
    gid text NOT NULL,
    task_id uuid,
    checkpoint_id bigint,
    sink text NOT NULL,
    handle jsonb NOT NULL DEFAULT '{}',
    lease_token uuid,
    decision text,
    state text NOT NULL DEFAULT 'open',
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
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
CREATE INDEX ix_sink_transaction_task_id ON ledger.sink_transaction (task_id);
CREATE INDEX ix_sink_transaction_unfinished ON ledger.sink_transaction (created_at) WHERE state NOT IN ('committed', 'aborted');

CREATE TABLE ledger.installation (
    only_row boolean NOT NULL DEFAULT true,
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    CONSTRAINT pk_installation PRIMARY KEY (only_row),
    CONSTRAINT ck_installation_only_row CHECK (only_row)
);

CREATE TABLE ledger.sink_use (
    type text NOT NULL,
    sink text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_sink_use PRIMARY KEY (type, sink)
);

-- Documents.

CREATE TABLE ledger.document (
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    principal text NOT NULL DEFAULT '',
    name text NOT NULL,
    media_type text NOT NULL,
    sha256 bytea NOT NULL,
    content bytea NOT NULL,
    size_bytes bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    updated_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    revision integer NOT NULL DEFAULT 1,
    CONSTRAINT pk_document PRIMARY KEY (id),
    CONSTRAINT ck_document_sha256 CHECK (octet_length(sha256) = 32),
    CONSTRAINT ck_document_size_bytes CHECK (size_bytes = octet_length(content)),
    CONSTRAINT ck_document_revision CHECK (revision >= 1),
    CONSTRAINT uq_document_principal_name UNIQUE (principal, name)
);

CREATE TABLE ledger.document_chunk (
    document_id uuid NOT NULL,
    position integer NOT NULL,
    text text NOT NULL,
    words tsvector NOT NULL GENERATED ALWAYS AS (to_tsvector('simple'::regconfig, text)) STORED,
    CONSTRAINT pk_document_chunk PRIMARY KEY (document_id, position),
    CONSTRAINT ck_document_chunk_position CHECK (position >= 0),
    CONSTRAINT fk_document_chunk_document_id FOREIGN KEY (document_id) REFERENCES ledger.document (id) ON DELETE CASCADE
);
CREATE INDEX ix_document_chunk_words ON ledger.document_chunk USING gin (words);

-- Chats.

CREATE TABLE ledger.chat (
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    first_user_id text NOT NULL,
    second_user_id text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_chat PRIMARY KEY (id),
    CONSTRAINT uq_chat_first_user_id_second_user_id UNIQUE (first_user_id, second_user_id),
    CONSTRAINT ck_chat_user_order CHECK (first_user_id COLLATE "C" <= second_user_id COLLATE "C")
);

CREATE TABLE ledger.chat_member (
    chat_id uuid NOT NULL,
    user_id text NOT NULL,
    read_until_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_chat_member PRIMARY KEY (chat_id, user_id),
    CONSTRAINT fk_chat_member_chat_id FOREIGN KEY (chat_id) REFERENCES ledger.chat (id) ON DELETE CASCADE
);
CREATE INDEX ix_chat_member_user_id ON ledger.chat_member (user_id);

CREATE TABLE ledger.chat_message (
    id uuid NOT NULL,
    chat_id uuid NOT NULL,
    client_msg_id text NOT NULL,
    from_user_id text NOT NULL,
    to_user_id text NOT NULL,
    msg_type text NOT NULL DEFAULT 'text',
    body text NOT NULL,
    producer_server_id text,
    sent_at timestamptz,
    accepted_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    saved_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    transaction_id bigint NOT NULL DEFAULT CAST(CAST(pg_current_xact_id() AS text) AS bigint),
    CONSTRAINT pk_chat_message PRIMARY KEY (id),
    CONSTRAINT uq_chat_message_from_user_id_client_msg_id UNIQUE (from_user_id, client_msg_id),
    CONSTRAINT fk_chat_message_chat_id FOREIGN KEY (chat_id) REFERENCES ledger.chat (id) ON DELETE CASCADE
);
CREATE INDEX ix_chat_message_history ON ledger.chat_message (chat_id, accepted_at, id);
CREATE INDEX ix_chat_message_to ON ledger.chat_message (to_user_id, transaction_id);
CREATE INDEX ix_chat_message_from ON ledger.chat_message (from_user_id, transaction_id);

-- Receipts.

CREATE TABLE ledger.receipt (
    seq bigint GENERATED ALWAYS AS IDENTITY,
    id uuid NOT NULL,
    level text NOT NULL,
    kind text NOT NULL,
    principal text NOT NULL,
    client_id text,
    payload_sha text NOT NULL,
    policy text NOT NULL,
    is_ordered boolean NOT NULL DEFAULT true,
    accepted_at timestamptz NOT NULL,
    promised_by timestamptz NOT NULL,
    saved_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    code text,
    reason text,
    entry jsonb,
    task_id uuid,
    CONSTRAINT pk_receipt PRIMARY KEY (seq),
    CONSTRAINT uq_receipt_id_level UNIQUE (id, level),
    CONSTRAINT ck_receipt_level CHECK (level IN ('saved', 'rejected')),
    CONSTRAINT ck_receipt_rejected_has_a_reason CHECK ((level = 'rejected') = (code IS NOT NULL) AND (code IS NULL) = (reason IS NULL)),
    CONSTRAINT ck_receipt_promise CHECK (promised_by >= accepted_at)
);
CREATE INDEX ix_receipt_rejected ON ledger.receipt (seq) WHERE level = 'rejected';
CREATE INDEX ix_receipt_saved_at ON ledger.receipt (saved_at);

CREATE TABLE ledger.receipt_switch (
    name text NOT NULL,
    is_on boolean NOT NULL,
    actor text NOT NULL DEFAULT CURRENT_USER,
    changed_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_receipt_switch PRIMARY KEY (name),
    CONSTRAINT ck_receipt_switch_name CHECK (name IN ('two_phase', 'deliver_before_saved', 'fail_open'))
);

-- Coordination: streams, ticks, queues, tokens.

CREATE TABLE ledger.checkpoint (
    id bigint GENERATED ALWAYS AS IDENTITY,
    stream text NOT NULL,
    shard integer NOT NULL DEFAULT 0,
    offsets jsonb NOT NULL DEFAULT '{}',
    state jsonb NOT NULL DEFAULT '{}',
    sink_committed boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    completed_at timestamptz,
    CONSTRAINT pk_checkpoint PRIMARY KEY (id),
    CONSTRAINT ck_checkpoint_shard CHECK (shard >= 0)
);
CREATE INDEX ix_checkpoint_newest ON ledger.checkpoint (stream, shard, id);

CREATE TABLE ledger.shard_lease (
    stream text NOT NULL,
    shard integer NOT NULL,
    holder text,
    lease_token uuid,
    lease_until timestamptz,
    CONSTRAINT pk_shard_lease PRIMARY KEY (stream, shard),
    CONSTRAINT ck_shard_lease_shard CHECK (shard >= 0),
    CONSTRAINT ck_shard_lease_lease CHECK ((lease_token IS NULL) = (lease_until IS NULL) AND (lease_token IS NULL OR holder IS NOT NULL))
);

CREATE TABLE ledger.tick (
    name text NOT NULL,
    holder text,
    lease_token uuid,
    lease_until timestamptz,
    started_at timestamptz,
    finished_at timestamptz,
    error text,
    CONSTRAINT pk_tick PRIMARY KEY (name),
    CONSTRAINT ck_tick_lease CHECK ((lease_token IS NULL) = (lease_until IS NULL) AND (lease_token IS NULL OR holder IS NOT NULL))
);

-- The tally: what became of tasks and events. Rows of task_tally are folded into tally_period every few seconds.

CREATE TABLE ledger.task_tally (
    id bigint GENERATED ALWAYS AS IDENTITY,
    minute timestamptz NOT NULL,
    subject text NOT NULL,
    queue text NOT NULL,
    type text NOT NULL,
    result text NOT NULL,
    count integer NOT NULL,
    run_seconds double precision NOT NULL,
    run integer[] NOT NULL,
    wait_seconds double precision NOT NULL,
    wait integer[] NOT NULL,
    kind bigint NOT NULL,
    CONSTRAINT pk_task_tally PRIMARY KEY (id)
) WITH (fillfactor = 100, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE ledger.tally_period (
    span text NOT NULL,
    start timestamptz NOT NULL,
    subject text NOT NULL,
    queue text NOT NULL,
    type text NOT NULL,
    result text NOT NULL,
    count bigint NOT NULL,
    run_seconds double precision NOT NULL,
    run bigint[] NOT NULL DEFAULT '{}',
    wait_seconds double precision NOT NULL,
    wait bigint[] NOT NULL DEFAULT '{}',
    CONSTRAINT pk_tally_period PRIMARY KEY (span, start, subject, queue, type, result),
    CONSTRAINT ck_tally_period_span CHECK (span IN ('minute', 'hour', 'day', 'ever')),
    CONSTRAINT ck_tally_period_ever CHECK ((span = 'ever') = (start = '-infinity'))
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

-- Add a histogram, several times, to another one; the shorter one ends with zeros that are left out.
CREATE FUNCTION ledger.tally_add(one bigint[], other bigint[], times bigint) RETURNS bigint[] LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce((
    SELECT array_agg(coalesce(a, 0) + coalesce(b, 0) * times ORDER BY place)
    FROM unnest(one, other) WITH ORDINALITY AS both_(a, b, place)), '{}');

CREATE AGGREGATE ledger.tally_histogram(bigint[], bigint) (SFUNC = ledger.tally_add, STYPE = bigint[], INITCOND = '{}');

CREATE TABLE ledger.queue_pause (
    queue text NOT NULL,
    intake boolean NOT NULL DEFAULT false,
    reason text,
    actor text NOT NULL DEFAULT CURRENT_USER,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_queue_pause PRIMARY KEY (queue, intake)
);

CREATE TABLE ledger.queue_scale (
    queue text NOT NULL,
    processes integer NOT NULL,
    actor text NOT NULL DEFAULT CURRENT_USER,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_queue_scale PRIMARY KEY (queue),
    CONSTRAINT ck_queue_scale_processes CHECK (processes BETWEEN 1 AND 128)
);

CREATE TABLE ledger.queue_alert (
    queue text NOT NULL,
    waiting integer NOT NULL DEFAULT 0,
    refuses boolean NOT NULL DEFAULT false,
    processes integer,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_queue_alert PRIMARY KEY (queue),
    CONSTRAINT ck_queue_alert_processes CHECK (processes BETWEEN 1 AND 128)
);

CREATE TABLE ledger.api_token (
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    name text NOT NULL,
    token_sha256 bytea NOT NULL,
    scopes text[] NOT NULL DEFAULT '{}',
    types text[] NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    expires_at timestamptz,
    revoked_at timestamptz,
    last_used_at timestamptz,
    CONSTRAINT pk_api_token PRIMARY KEY (id),
    CONSTRAINT uq_api_token_name UNIQUE (name),
    CONSTRAINT uq_api_token_token_sha256 UNIQUE (token_sha256),
    CONSTRAINT ck_api_token_token_sha256 CHECK (octet_length(token_sha256) = 32)
);

CREATE TABLE ledger.dead_mute (
    type text NOT NULL,
    error_fingerprint text NOT NULL,
    reason text NOT NULL,
    actor text NOT NULL DEFAULT CURRENT_USER,
    until_next_death boolean NOT NULL DEFAULT false,
    expires_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    CONSTRAINT pk_dead_mute PRIMARY KEY (type, error_fingerprint),
    CONSTRAINT ck_dead_mute_one_end CHECK (NOT (until_next_death AND expires_at IS NOT NULL))
);

CREATE TABLE ledger.console_session (
    session_sha256 bytea NOT NULL,
    token_sha256 bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_console_session PRIMARY KEY (session_sha256),
    CONSTRAINT ck_console_session_session_sha256 CHECK (octet_length(session_sha256) = 32)
);

CREATE TABLE ledger.console_link (
    code_sha256 bytea NOT NULL,
    token_sha256 bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT ledger.ledger_now(),
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_console_link PRIMARY KEY (code_sha256),
    CONSTRAINT ck_console_link_code_sha256 CHECK (octet_length(code_sha256) = 32)
);

-- Submitting. `ingest_submit_many` is the only implementation, for Python and for SQL.

-- Errors of one kind have one fingerprint. What may vary is left out: a UUID as a whole, because some of its groups may
-- have no digit; numbers and hexadecimal ids; quoted words, where an apostrophe within a word does not begin a quotation.
-- The statements that write an error call this. A generated column would cost every other change of a task 2 µs.
CREATE FUNCTION ledger.ingest_error_fingerprint(code text, message text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT to_hex(hashtextextended(coalesce(code, '') || ' ' || regexp_replace(message,
        '[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9a-fA-F]*[0-9][0-9a-fA-F]*([.,][0-9]+)*|"[^"]*"|(?<!\w)''[^'']*''',
        '#', 'g'), 0)) $$;

-- The hash is equal for payloads that are equal as jsonb. PostgreSQL prints those alike, except for zeros at the end of
-- a fraction, which are removed here.
CREATE FUNCTION ledger.ingest_payload_sha(payload jsonb) RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
RETURN encode(sha256(convert_to(regexp_replace(CAST(payload AS text),
    '("(?:[^"\\]|\\.)*")|(\.[0-9]*[1-9])0+(?![0-9])|\.0+(?![0-9])', '\1\2', 'g'), 'UTF8')), 'hex');

-- The id of a task with an idempotency key: a UUIDv8, the same as `tasks/core/task_ids.py` computes.
CREATE FUNCTION ledger.ingest_task_id(type text, key text) RETURNS uuid LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
DECLARE
    raw bytea := substring(sha256(convert_to(type || chr(31) || key, 'UTF8')) FROM 1 FOR 16);
BEGIN
    raw := set_byte(raw, 6, (get_byte(raw, 6) & 15) | 128);
    RETURN CAST(encode(set_byte(raw, 8, (get_byte(raw, 8) & 63) | 128), 'hex') AS uuid);
END $$;

-- The id of a task without a key: a UUIDv7, 48 bits of milliseconds, the rest random.
CREATE FUNCTION ledger.ingest_fresh_id() RETURNS uuid LANGUAGE plpgsql PARALLEL SAFE AS $$
DECLARE
    raw bytea := decode(lpad(to_hex(CAST(extract(epoch FROM ledger.ledger_now()) * 1000 AS bigint)), 12, '0'), 'hex')
                 || substring(uuid_send(gen_random_uuid()) FROM 7);
BEGIN
    RETURN CAST(encode(set_byte(raw, 6, (get_byte(raw, 6) & 15) | 112), 'hex') AS uuid);
END $$;

-- Delete newly inserted tasks whose key belongs to a pruned task, and return their ids. An INSERT that waited for the
-- pruning did not see the new tombstones; a volatile function sees them. At REPEATABLE READ and above it does not:
-- inserting a tombstone where an invisible one exists raises 40001 there, and the caller repeats its transaction.
CREATE FUNCTION ledger.ingest_give_way(ids uuid[]) RETURNS uuid[] LANGUAGE plpgsql AS $$
DECLARE
    gave_way uuid[];
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        INSERT INTO ledger.task_tombstone (id, status, payload_sha) SELECT unnest(ids), 'DISCARDED', ''
        ON CONFLICT (id) DO NOTHING;
        DELETE FROM ledger.task_tombstone WHERE id = ANY(ids) AND payload_sha = '';
    END IF;
    WITH gone AS (
        DELETE FROM ledger.ingest_task task USING ledger.task_tombstone stone
        WHERE stone.id = ANY(ids) AND task.id = stone.id RETURNING task.id)
    SELECT coalesce(array_agg(id), '{}') INTO gave_way FROM gone;
    RETURN gave_way;
END $$;

-- Wait for the commit of the previous transaction that submitted to this partition key, so that key_seq follows the
-- order of commits.
CREATE FUNCTION ledger.ingest_key_lock(partition_key text) RETURNS void LANGUAGE sql
RETURN pg_advisory_xact_lock(hashtextextended(partition_key, CAST(CAST('ledger.ingest_task' AS regclass) AS bigint)));

-- Lock all partition keys, sorted, so that two calls do not deadlock; then draw a key_seq for each task that has a key.
CREATE FUNCTION ledger.ingest_draw_turns(partition_keys text[]) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
    turns bigint[];
BEGIN
    PERFORM ledger.ingest_key_lock(key) FROM (
        SELECT DISTINCT key COLLATE "C" AS key FROM unnest(partition_keys) AS given(key) WHERE key IS NOT NULL
        ORDER BY key) AS sorted;
    SELECT array_agg(turn ORDER BY place) INTO turns FROM (
        SELECT place, CASE WHEN key IS NOT NULL THEN nextval('ledger.ingest_task_key_seq') END AS turn
        FROM unnest(partition_keys) WITH ORDINALITY AS given(key, place) ORDER BY place) AS drawn;
    RETURN turns;
END $$;

-- Return the queues that workers have registered; `ingest` in a ledger without workers so far.
CREATE FUNCTION ledger.ingest_known_queues() RETURNS text[] LANGUAGE sql STABLE PARALLEL SAFE
RETURN coalesce((SELECT array_agg(queue ORDER BY queue) FROM ledger.task_queue), '{ingest}');

-- Fill in what the submitter does not know about its tasks. A NULL in `batches` marks a task whose handler it does not
-- have. Given values win, then those that workers have registered for the type, then the max_attempts of the queue's
-- workers, then the defaults of `@handler`. `unknown_type` is a type that no worker has registered, `unknown_queue` a
-- queue that none has; both are NULL if there is no such task.
CREATE FUNCTION ledger.ingest_fill_in(
    types text[], INOUT queues text[], INOUT priorities integer[], INOUT max_attempts integer[], INOUT batches integer[],
    OUT unknown_type text, OUT unknown_queue text
) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    known record;
    listed record;
BEGIN
    IF cardinality(types) = 1 THEN  -- the common case needs no grouping
        SELECT type, queue, priority, task_type.max_attempts, batch INTO known
        FROM ledger.task_type WHERE type = types[1];
        queues[1] := coalesce(queues[1], known.queue, 'ingest');
        SELECT queue, task_queue.max_attempts INTO listed FROM ledger.task_queue WHERE queue = queues[1];
        priorities[1] := coalesce(priorities[1], known.priority, 5);
        max_attempts[1] := coalesce(max_attempts[1], known.max_attempts, listed.max_attempts, 10);
        batches[1] := coalesce(known.batch, 1000);
        unknown_type := CASE WHEN known.type IS NULL THEN types[1] END;
        IF listed.queue IS NULL AND queues[1] <> ALL(ledger.ingest_known_queues()) THEN
            unknown_queue := queues[1];
        END IF;
        RETURN;
    END IF;
    SELECT array_agg(chosen.queue ORDER BY place),
           array_agg(coalesce(given.priority, known.priority, 5) ORDER BY place),
           array_agg(coalesce(given.attempts, known.max_attempts, listed.max_attempts, 10) ORDER BY place),
           array_agg(coalesce(given.batch, known.batch, 1000) ORDER BY place),
           min(given.type) FILTER (WHERE given.batch IS NULL AND known.type IS NULL),
           min(chosen.queue) FILTER (WHERE given.batch IS NULL AND listed.queue IS NULL
                                       AND chosen.queue <> ALL(ledger.ingest_known_queues()))
    INTO queues, priorities, max_attempts, batches, unknown_type, unknown_queue
    FROM unnest(types, queues, priorities, ingest_fill_in.max_attempts, batches) WITH ORDINALITY
         AS given(type, queue, priority, attempts, batch, place)
    LEFT JOIN ledger.task_type known ON known.type = given.type AND given.batch IS NULL
    CROSS JOIN LATERAL (SELECT coalesce(given.queue, known.queue, 'ingest') AS queue) AS chosen
    LEFT JOIN ledger.task_queue listed ON listed.queue = chosen.queue AND given.batch IS NULL;
END $$;

-- submit: → QUEUED. Each task gets its first transition, and tasks of the same type, queue, priority and due time share
-- one wake-up per batch. A wake-up that is due now is leased to the submitting process (`holder`, `token`) if its queue
-- is in `leased_queues`. A task whose id exists, or existed and was pruned, is not changed: its element of `statuses`
-- is the status that was found, and its element of `same` says whether the payload is the same. `statuses` has NULL for
-- a new task, and an empty text for a task that was pruned during the call. Both arrays are NULL if all tasks are new.
-- A NULL in `batches`: see `ingest_fill_in`. If `unknown_queue` is returned, nothing was submitted; the same goes for
-- `unknown_type`, unless `needs_handler` is false. If `refusing_queue` is returned, nothing was submitted either: its
-- intake is paused, or its backlog is too large. With `refusable` false the tasks are submitted all the same. A task
-- expires at its element of `expires_ats`, or so many seconds from now as its element of `expire_delays` says; the arrays
-- are NULL if no task expires. A single task is inserted without arrays and grouping, which saves about 0.15 ms.
CREATE FUNCTION ledger.ingest_submit_many(
    ids uuid[], types text[], payloads jsonb[], contexts jsonb[], queues text[], priorities integer[], keys text[],
    max_attempts integer[], run_ats timestamptz[], delays double precision[], notifies text[], partition_keys text[],
    turns bigint[], batches integer[], actor text, holder text, token uuid, lease_seconds double precision,
    leased_queues text[], needs_handler boolean, refusable boolean, expires_ats timestamptz[], expire_delays double precision[],
    OUT statuses text[], OUT same boolean[], OUT wakeup_ids bigint[], OUT wakeups jsonb, OUT unknown_type text,
    OUT unknown_queue text, OUT refusing_queue text
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    stamp timestamptz;
    inserted uuid[];
    keyed uuid[];
    due timestamptz;  -- of a single task
    leased boolean;
BEGIN
    IF array_position(batches, NULL) IS NOT NULL THEN
        SELECT * INTO queues, priorities, max_attempts, batches, unknown_type, unknown_queue
        FROM ledger.ingest_fill_in(types, queues, priorities, ingest_submit_many.max_attempts, batches);
        IF unknown_queue IS NOT NULL OR (unknown_type IS NOT NULL AND needs_handler) THEN
            RETURN;
        END IF;
        unknown_type := NULL;
    END IF;
    IF EXISTS (SELECT FROM ledger.queue_pause UNION ALL SELECT FROM ledger.queue_alert WHERE refuses) THEN
        SELECT min(queue) INTO refusing_queue FROM (
            SELECT queue FROM ledger.queue_pause WHERE intake UNION ALL SELECT queue FROM ledger.queue_alert WHERE refuses
        ) AS closed WHERE refusable AND queue = ANY(queues);
        IF refusing_queue IS NOT NULL THEN
            RETURN;
        END IF;
        -- The relay drops the wake-ups of paused queues.
        leased_queues := ARRAY(SELECT unnest(leased_queues) EXCEPT SELECT queue FROM ledger.queue_pause WHERE NOT intake);
    END IF;
    IF turns IS NULL AND array_remove(partition_keys, NULL) <> '{}' THEN
        turns := ledger.ingest_draw_turns(partition_keys);
    END IF;
    stamp := ledger.ledger_now();
    IF cardinality(ids) = 1 THEN
        due := greatest(coalesce(run_ats[1], stamp + make_interval(secs => delays[1])), stamp);
        INSERT INTO ledger.ingest_task (id, type, payload, context, queue, priority, idempotency_key, max_attempts,
                                        next_retry_at, last_wakeup_at, notify, created_at, updated_at, partition_key,
                                        key_seq, expires_at)
        VALUES (ids[1], types[1], payloads[1], contexts[1], queues[1], priorities[1], keys[1],
                ingest_submit_many.max_attempts[1], CASE WHEN due > stamp THEN due END, due, notifies[1], stamp, stamp,
                partition_keys[1], turns[1],
                coalesce(expires_ats[1], stamp + make_interval(secs => expire_delays[1])))
        ON CONFLICT (id) DO NOTHING;
        IF FOUND THEN
            inserted := ids;
            keyed := CASE WHEN keys[1] IS NOT NULL THEN ids END;
        END IF;
    ELSE
        WITH given AS (
            SELECT given.*, greatest(coalesce(run_at, stamp + make_interval(secs => delay)), stamp) AS due_at
            FROM unnest(ids, types, payloads, contexts, queues, priorities, keys, max_attempts, run_ats, delays, notifies,
                        partition_keys, turns, expires_ats, expire_delays) WITH ORDINALITY
                 AS given(id, type, payload, context, queue, priority, key, attempts, run_at, delay, notify, partition_key,
                          turn, expires_at, expire_delay, place)),
        new AS (
            INSERT INTO ledger.ingest_task (id, type, payload, context, queue, priority, idempotency_key, max_attempts,
                                            next_retry_at, last_wakeup_at, notify, created_at, updated_at, partition_key,
                                            key_seq, expires_at)
            SELECT id, type, payload, context, queue, priority, key, attempts, CASE WHEN due_at > stamp THEN due_at END,
                   due_at, notify, stamp, stamp, partition_key, turn,
                   coalesce(expires_at, stamp + make_interval(secs => expire_delay))
            FROM given ORDER BY place
            ON CONFLICT (id) DO NOTHING
            RETURNING id, idempotency_key)
        SELECT array_agg(id), array_agg(id) FILTER (WHERE idempotency_key IS NOT NULL) INTO inserted, keyed FROM new;
    END IF;
    IF keyed IS NOT NULL THEN
        keyed := ledger.ingest_give_way(keyed);
        IF keyed <> '{}' THEN
            inserted := ARRAY(SELECT id FROM unnest(inserted) AS new(id) WHERE id <> ALL(keyed));
        END IF;
    END IF;
    INSERT INTO ledger.ingest_task_transition (task_id, to_status, actor, created_at)
    SELECT id, 'QUEUED', ingest_submit_many.actor, stamp FROM unnest(inserted) AS new(id);
    IF cardinality(ids) = 1 AND cardinality(inserted) = 1 THEN
        leased := due <= stamp AND queues[1] = ANY(leased_queues);
        INSERT INTO ledger.outbox_event (destination, payload, headers, next_retry_at, created_at,
                                         locked_by, locked_at, lease_token, lease_until)
        VALUES ('celery:' || queues[1],
                jsonb_build_object('type', types[1], 'ids', jsonb_build_array(ids[1]), 'batch', batches[1]),
                jsonb_strip_nulls(jsonb_build_object('priority', priorities[1], 'traceparent', contexts[1] -> 'traceparent')),
                CASE WHEN due > stamp THEN due END, stamp,
                CASE WHEN leased THEN holder END, CASE WHEN leased THEN stamp END, CASE WHEN leased THEN token END,
                CASE WHEN leased THEN stamp + make_interval(secs => lease_seconds) END)
        RETURNING ARRAY[id], CASE WHEN lease_token IS NOT NULL THEN
            jsonb_build_array(jsonb_build_array(id, destination, payload, headers, created_at)) END
        INTO wakeup_ids, wakeups;
    ELSIF cardinality(inserted) > 0 THEN
        WITH numbered AS (
            SELECT id, type, queue, priority, batch, traceparent, CASE WHEN due_at > stamp THEN due_at END AS due_at,
                   coalesce(due_at <= stamp, true) AND queue = ANY(leased_queues) AS leased,
                   row_number() OVER (PARTITION BY queue, type, priority, due_at, batch ORDER BY place) - 1 AS number
            FROM (
                SELECT DISTINCT ON (id) id, type, queue, priority, batch, place, context ->> 'traceparent' AS traceparent,
                       coalesce(run_at, stamp + make_interval(secs => delay)) AS due_at
                FROM unnest(ids, types, contexts, queues, priorities, batches, run_ats, delays) WITH ORDINALITY
                     AS given(id, type, context, queue, priority, batch, run_at, delay, place)
                WHERE id = ANY(inserted) ORDER BY id, place) AS new),
        woken AS (
            INSERT INTO ledger.outbox_event (destination, payload, headers, next_retry_at, created_at,
                                             locked_by, locked_at, lease_token, lease_until)
            SELECT 'celery:' || queue,
                   jsonb_build_object('type', type, 'ids', jsonb_agg(id ORDER BY number), 'batch', batch),
                   jsonb_strip_nulls(jsonb_build_object('priority', priority, 'traceparent', min(traceparent))), due_at, stamp,
                   CASE WHEN leased THEN holder END, CASE WHEN leased THEN stamp END, CASE WHEN leased THEN token END,
                   CASE WHEN leased THEN stamp + make_interval(secs => lease_seconds) END
            FROM numbered GROUP BY queue, type, priority, due_at, batch, leased, number / batch
            RETURNING id, destination, payload, headers, created_at, lease_token)
        SELECT array_agg(id),
               jsonb_agg(jsonb_build_array(id, destination, payload, headers, created_at)) FILTER (WHERE lease_token IS NOT NULL)
        INTO wakeup_ids, wakeups FROM woken;
    END IF;
    IF coalesce(cardinality(inserted), 0) < cardinality(ids) THEN
        SELECT array_agg(CASE WHEN is_new THEN NULL ELSE coalesce(task.status, stone.status, '') END ORDER BY place),
               array_agg(coalesce(task.payload = given.payload,
                                  stone.payload_sha = ledger.ingest_payload_sha(given.payload)) ORDER BY place)
        INTO statuses, same
        FROM (
            SELECT id, payload, place,
                   id = ANY(coalesce(inserted, '{}')) AND row_number() OVER (PARTITION BY id ORDER BY place) = 1 AS is_new
            FROM unnest(ids, payloads) WITH ORDINALITY AS given(id, payload, place)) AS given
        LEFT JOIN ledger.ingest_task task USING (id) LEFT JOIN ledger.task_tombstone stone USING (id);
    END IF;
END $$;

-- Return why Python would reject a payload (`outbox/canonical.py`) or could not parse it, or NULL. The payload is
-- searched only if its length and its characters allow a fault.
CREATE FUNCTION ledger.ingest_payload_fault(payload jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
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
END $$;

-- Submit one task from SQL, so that Django, Go or psql can do so in their own transaction:
--     SELECT celeriac.ingest_submit('invoice.import', '{"invoice": 17}', 'invoice 17');
-- Queue, priority and number of attempts are those that workers have registered for the type. SQLSTATE CL409: the key
-- belongs to a task with another payload. CL400: the type, a key, the queue, the time or the payload is invalid. CL413:
-- the payload is too large. CL429: the queue takes no new tasks now; try later. A task of a type that no worker knows
-- waits, and `manage.py show` says so.
CREATE FUNCTION ledger.ingest_submit(type text, payload jsonb, key text DEFAULT NULL, queue text DEFAULT NULL,
                                     run_at timestamptz DEFAULT NULL, partition_key text DEFAULT NULL)
RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    task uuid := CASE WHEN key IS NULL THEN ledger.ingest_fresh_id() ELSE ledger.ingest_task_id(type, key) END;
    unknown CONSTANT integer[] := ARRAY[NULL];
    fault text;
    found record;
BEGIN
    payload := coalesce(payload, 'null');
    fault := ledger.ingest_payload_fault(payload);
    IF type IS NULL OR type !~ '^[A-Za-z0-9][A-Za-z0-9_.:-]{0,99}$' THEN
        RAISE EXCEPTION USING ERRCODE = 'CL400',
            MESSAGE = 'A type consists of letters, digits and . _ : - and has at most 100 characters.';
    ELSIF length(key) NOT BETWEEN 1 AND 500 OR key ~ '[\u0001-\u001f\u007f-\u009f]' THEN
        RAISE EXCEPTION USING ERRCODE = 'CL400',
            MESSAGE = 'A key is text of 1 to 500 characters without control characters.';
    ELSIF length(partition_key) NOT BETWEEN 1 AND 500 OR partition_key ~ '[\u0001-\u001f\u007f-\u009f]' THEN
        RAISE EXCEPTION USING ERRCODE = 'CL400',
            MESSAGE = 'A partition key is text of 1 to 500 characters without control characters.';
    ELSIF octet_length(CAST(payload AS text)) > 1048576 THEN
        RAISE EXCEPTION USING ERRCODE = 'CL413',
            MESSAGE = format('The payload has %s bytes; the limit is 1048576.', octet_length(CAST(payload AS text)));
    ELSIF fault IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'CL400', MESSAGE = fault;
    ELSIF run_at > '9000-01-01 00:00+00' THEN
        RAISE EXCEPTION USING ERRCODE = 'CL400', MESSAGE = 'run_at is more than a thousand years away.';
    END IF;
    SELECT statuses[1] AS status, same[1] AS same, unknown_queue, refusing_queue INTO found FROM ledger.ingest_submit_many(
        ARRAY[task], ARRAY[type], ARRAY[payload], ARRAY[CAST('{}' AS jsonb)], ARRAY[queue], unknown, ARRAY[key], unknown,
        ARRAY[run_at], CAST(ARRAY[NULL] AS double precision[]), CAST(ARRAY[NULL] AS text[]), ARRAY[partition_key], NULL,
        unknown, current_user, NULL, NULL, NULL, '{}', false, true, NULL, NULL);
    IF found.unknown_queue IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'CL400', MESSAGE = format('There is no queue %L; the workers know %s.',
            left(found.unknown_queue, 100), array_to_string(ledger.ingest_known_queues(), ', '));
    ELSIF found.refusing_queue IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'CL429',
            MESSAGE = format('The queue %L takes no new tasks now; try again later.', found.refusing_queue);
    ELSIF found.status = '' THEN
        RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
            MESSAGE = format('The task %s was pruned at this very moment; submit it again.', task);
    ELSIF NOT found.same THEN
        RAISE EXCEPTION USING ERRCODE = 'CL409',
            MESSAGE = format('The key belongs to the task %s, which has another payload.', task);
    END IF;
    RETURN task;
END $$;
