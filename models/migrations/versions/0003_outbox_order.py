"""Ordered keys, explicit dedup keys, and indexes for pruning and for operators; the reasons stand beside the model."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"

UPGRADE = (
    "ALTER TABLE outbox_event ADD COLUMN dedup_key text",
    'ALTER TABLE outbox_event ALTER COLUMN ordering_key TYPE text COLLATE "C"',
    "DROP INDEX ix_outbox_event_unsent",
    "DROP INDEX ix_outbox_event_dedup",
    """CREATE INDEX ix_outbox_event_unsent ON outbox_event (destination, coalesce(next_retry_at, '-infinity'), id)
       WHERE status IN ('NEW', 'RETRYING') AND ordering_key IS NULL""",
    """CREATE INDEX ix_outbox_event_ordered ON outbox_event (destination, ordering_key, id)
       WHERE ordering_key IS NOT NULL AND status <> 'SENT'""",
    "CREATE INDEX ix_outbox_event_retrying ON outbox_event (destination) WHERE status = 'RETRYING'",
    """CREATE INDEX ix_outbox_event_dedup ON outbox_event (destination, coalesce(dedup_key, payload_sha))
       WHERE status = 'SENT' AND coalesce(dedup_key, payload_sha) IS NOT NULL""",
    "CREATE INDEX ix_outbox_event_sent ON outbox_event (sent_at) WHERE status = 'SENT'",
    "CREATE INDEX ix_outbox_event_dead ON outbox_event (id) WHERE status = 'DEAD'",
    """CREATE FUNCTION outbox_event_in_turn() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(NEW.destination || chr(31) || NEW.ordering_key, 0));
    NEW.id := nextval(pg_get_serial_sequence(format('%I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME), 'id'));
    RETURN NEW;
END $$""",
    """CREATE TRIGGER outbox_event_in_turn BEFORE INSERT ON outbox_event
       FOR EACH ROW WHEN (NEW.ordering_key IS NOT NULL) EXECUTE FUNCTION outbox_event_in_turn()""",
)

DOWNGRADE = (
    "DROP TRIGGER outbox_event_in_turn ON outbox_event",
    "DROP FUNCTION outbox_event_in_turn()",
    "DROP INDEX ix_outbox_event_dead",
    "DROP INDEX ix_outbox_event_sent",
    "DROP INDEX ix_outbox_event_dedup",
    "DROP INDEX ix_outbox_event_retrying",
    "DROP INDEX ix_outbox_event_ordered",
    "DROP INDEX ix_outbox_event_unsent",
    """CREATE INDEX ix_outbox_event_unsent ON outbox_event (destination, coalesce(next_retry_at, '-infinity'), id)
       WHERE status IN ('NEW', 'RETRYING')""",
    """CREATE INDEX ix_outbox_event_dedup ON outbox_event (destination, payload_sha)
       WHERE status = 'SENT' AND payload_sha IS NOT NULL""",
    "ALTER TABLE outbox_event ALTER COLUMN ordering_key TYPE text",
    "ALTER TABLE outbox_event DROP COLUMN dedup_key",
)


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
