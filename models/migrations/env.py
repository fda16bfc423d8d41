"""What Alembic runs for a migration. The connection, its locks and its timeouts come from `models.schema`."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from models.tables import Base

connection: Connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    version_table_schema=context.config.attributes["schema"],
)
with context.begin_transaction():
    context.run_migrations()
