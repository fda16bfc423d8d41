"""The index of unsent events begins with the destination; why stands beside the model."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"

BY_DESTINATION = """
DROP INDEX ix_outbox_event_unsent;
CREATE INDEX ix_outbox_event_unsent ON outbox_event (destination, coalesce(next_retry_at, '-infinity'), id)
    WHERE status IN ('NEW', 'RETRYING');
"""

BY_TIME = """
DROP INDEX ix_outbox_event_unsent;
CREATE INDEX ix_outbox_event_unsent ON outbox_event (coalesce(next_retry_at, '-infinity'), id)
    WHERE status IN ('NEW', 'RETRYING');
"""


def upgrade() -> None:
    op.execute(BY_DESTINATION)


def downgrade() -> None:
    op.execute(BY_TIME)
