"""Alembic runs this file for a migration. `models.schema` provides the connection with its lock and its timeouts."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from models.tables import Base

connection: Connection = context.config.attributes["connection"]
context.configure(connection, target_metadata=Base.metadata, **context.config.attributes["version_table"])
with context.begin_transaction():
    context.run_migrations()
