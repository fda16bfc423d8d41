"""One document per name, and a number for each upload that changed it; the reasons stand beside the models."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.execute("ALTER TABLE document ADD COLUMN revision integer NOT NULL DEFAULT 1")
    op.execute("ALTER TABLE document ADD CONSTRAINT ck_document_revision CHECK (revision >= 1)")
    op.execute("ALTER TABLE document ADD CONSTRAINT uq_document_name UNIQUE (name)")


def downgrade() -> None:
    op.execute("ALTER TABLE document DROP CONSTRAINT uq_document_name")
    op.execute("ALTER TABLE document DROP CONSTRAINT ck_document_revision")
    op.execute("ALTER TABLE document DROP COLUMN revision")
