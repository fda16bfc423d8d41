"""A submit with an old snapshot meets the tombstone of its key; the reasons stand beside the models."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"

UPGRADE = """CREATE OR REPLACE FUNCTION ingest_give_way(ids uuid[]) RETURNS uuid[] LANGUAGE plpgsql AS $$
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
END $$"""

DOWNGRADE = """CREATE OR REPLACE FUNCTION ingest_give_way(ids uuid[]) RETURNS uuid[] LANGUAGE plpgsql AS $$
DECLARE
    gave_way uuid[];
BEGIN
    WITH gone AS (
        DELETE FROM ingest_task task USING task_tombstone stone
        WHERE stone.id = ANY(ids) AND task.id = stone.id RETURNING task.id)
    SELECT coalesce(array_agg(id), '{}') INTO gave_way FROM gone;
    RETURN gave_way;
END $$"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
