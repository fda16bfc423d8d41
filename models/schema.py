"""Migrate the ledger's schema. Safe to run concurrently, and every wait for a lock ends.

One session holds an advisory lock during the whole migration. A second migration waits for it, finds nothing to do, and
returns. That wait, and the wait for each lock of the DDL, end after `lock_timeout`: every statement would queue behind
a migration that waits for a long transaction. The result is read through a second connection, because a migration that
forgot to commit looks finished from its own connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateSchema

import settings
from models.engine import engine as ledger_engine
from models.errors import LedgerBusy, Misuse, SchemaMismatch

MIGRATIONS: Path = Path(__file__).resolve().parent / "migrations"
# Advisory locks belong to a database, so the key contains the schema: each installation has its own lock.
MIGRATION_LOCK: Final = text("SELECT pg_advisory_lock(hashtextextended('celeriac migration of ' || :schema, 0))")
SCHEMA_EXISTS: Final = text("SELECT 1 FROM pg_namespace WHERE nspname = :schema")
BUSY: Final = frozenset({"55P03", "40P01"})  # lock_not_available, deadlock_detected


def migrate(engine: Engine, revision: str = "head", *, lock_timeout_seconds: float = 10.0) -> str | None:
    """Migrate up or down to a revision, or to "head" or "base", and return the revision of the database afterwards."""
    revisions = [None, *known_revisions()]
    target = {"head": revisions[-1], "base": None}.get(revision, revision)
    if target not in revisions:
        raise Misuse(f"There is no revision {target!r}. Use one of: {', '.join([*known_revisions(), 'head', 'base'])}.")
    with _locked_session(engine, lock_timeout_seconds) as connection:
        before = current_revision(connection)
        if before not in revisions:
            raise SchemaMismatch(
                f"The database is at revision {before}, which this code does not know: a newer version of Celeriac has"
                f" migrated it. This code ends at {revisions[-1]}; upgrade the code."
            )
        _ensure_schema(connection)
        connection.commit()  # Alembic commits only a transaction that it began; the lock and the timeout stay
        if before != target:
            move = command.upgrade if revisions.index(before) < revisions.index(target) else command.downgrade
            move(_config(connection), target or "base")
    with engine.connect() as witness:
        after = current_revision(witness)
    if after != target:
        raise SchemaMismatch(f"The migration to {target or 'base'} ended, but the database is at {after or 'base'}.")
    return after


def current_revision(connection: Connection) -> str | None:
    """Return the revision of the database, or None if it was never migrated."""
    return MigrationContext.configure(connection, opts=_version_table()).get_current_revision()


def head_revision() -> str:
    """Return the revision that this code needs."""
    return known_revisions()[-1]


def known_revisions() -> list[str]:
    """Return the revisions that this code knows, oldest first."""
    scripts = ScriptDirectory.from_config(_config())
    return [script.revision for script in scripts.walk_revisions()][::-1]


def require_ready(*, newer_is_ready: bool = False) -> None:
    """Raise SchemaMismatch unless the database has the revision that this code needs.

    With `newer_is_ready`, a revision unknown to this code is accepted: during a rolling deployment the old workers go
    on while newer code has already migrated.
    """
    with ledger_engine().connect() as connection:
        found = current_revision(connection)
    if newer_is_ready and found is not None and found not in known_revisions():
        return
    if found != head_revision():
        raise SchemaMismatch(
            f"The schema is at {found or 'no revision'}, this code needs {head_revision()}: run `manage.py migrate`."
        )


@contextmanager
def _locked_session(engine: Engine, lock_timeout_seconds: float) -> Iterator[Connection]:
    """Yield a connection with the migration lock. It is closed, not pooled, so that lock and timeout end with it."""
    milliseconds = max(1, round(lock_timeout_seconds * 1000))  # 0 would mean no timeout
    with engine.connect() as connection:
        connection.detach()
        try:
            connection.execute(text("SELECT set_config('lock_timeout', :t, false)"), {"t": str(milliseconds)})
            connection.execute(MIGRATION_LOCK, {"schema": settings.current().ledger_schema})
            yield connection
        except DBAPIError as error:
            if getattr(error.orig, "pgcode", None) not in BUSY:
                raise
            raise LedgerBusy(
                f"The schema was not changed: a lock was not free within {lock_timeout_seconds:g} s. Another migration"
                " or a long transaction holds it; try again when it has ended."
            ) from error


def _ensure_schema(connection: Connection) -> None:
    """Create the schema if it is missing. For a role that may not do so, an administrator creates it beforehand."""
    schema = settings.current().ledger_schema
    if not connection.execute(SCHEMA_EXISTS, {"schema": schema}).scalar():
        connection.execute(CreateSchema(schema))


def _version_table() -> dict[str, str]:
    """Return where Alembic stores our revision: not in `alembic_version`, which an application may find on its path."""
    return {"version_table": "celeriac_version", "version_table_schema": settings.current().ledger_schema}


def _config(connection: Connection | None = None) -> Config:
    """Return Alembic's configuration, without a file. Its parser interpolates %, which a path may contain."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes.update(connection=connection, version_table=_version_table())
    return config
