"""The schema's way from one revision to another, safe to start twice at once and never waiting without end.

One session holds an advisory lock for the whole migration, so a second one waits, finds nothing to do, and returns.
That wait, and that for each lock of the DDL itself, end after `lock_timeout`: a migration that queues behind a long
transaction would stop every statement that comes after it. The result is read from a second connection, because a
migration that forgot to commit looks finished from its own.
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
# Advisory locks are per database; this one is per installation.
MIGRATION_LOCK: Final = text("SELECT pg_advisory_lock(hashtextextended('celeriac migration of ' || :schema, 0))")
SCHEMA_EXISTS: Final = text("SELECT 1 FROM pg_namespace WHERE nspname = :schema")
BUSY: Final = frozenset({"55P03", "40P01"})  # lock_not_available, deadlock_detected


def migrate(engine: Engine, revision: str = "head", *, lock_timeout_seconds: float = 10.0) -> str | None:
    """Bring the database to `revision` ("head", "base", or one by name), up or down, and return where it is now."""
    target = _resolve(revision)
    with _locked_session(engine, lock_timeout_seconds) as connection:
        before = current_revision(connection)
        _require_known(before)
        _ensure_schema(connection)
        connection.commit()  # lock and timeout outlive it; Alembic commits only a transaction that it began itself
        _walk(connection, before, target)
    with engine.connect() as witness:
        after = current_revision(witness)
    if after != target:
        raise SchemaMismatch(f"The migration to {target or 'base'} ended, but the database is at {after or 'base'}.")
    return after


def current_revision(connection: Connection) -> str | None:
    """The revision that the database is at; None for one without a schema."""
    return MigrationContext.configure(connection, opts=_version_table()).get_current_revision()


def head_revision() -> str:
    """The revision that this code was written for."""
    return known_revisions()[-1]


def known_revisions() -> list[str]:
    """Every revision of this code, oldest first."""
    scripts = ScriptDirectory.from_config(_config())
    return [script.revision for script in scripts.walk_revisions()][::-1]


def require_ready(*, newer_is_ready: bool = False) -> None:
    """`newer_is_ready`: a schema that this code does not know was made by newer code, and yesterday's workers may go on
    with it while a deployment rolls."""
    with ledger_engine().connect() as connection:
        found = current_revision(connection)
    if newer_is_ready and found is not None and found not in known_revisions():
        return
    if found != head_revision():
        raise SchemaMismatch(
            f"The schema is at {found or 'nothing'}, this code needs {head_revision()}: run `manage.py migrate`."
        )


@contextmanager
def _locked_session(engine: Engine, lock_timeout_seconds: float) -> Iterator[Connection]:
    """A connection with the migration lock. It is closed, not pooled: its lock and its lock_timeout end with it."""
    milliseconds = max(1, round(lock_timeout_seconds * 1000))  # 0 would mean for ever
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
    """Create the schema if it is missing. A role that may not create one can be given it by an administrator."""
    schema = settings.current().ledger_schema
    if not connection.execute(SCHEMA_EXISTS, {"schema": schema}).scalar():
        connection.execute(CreateSchema(schema))


def _version_table() -> dict[str, str]:
    return {"version_table_schema": settings.current().ledger_schema}


def _walk(connection: Connection, before: str | None, target: str | None) -> None:
    way = [None, *known_revisions()]
    steps = way.index(target) - way.index(before)
    if steps > 0:
        command.upgrade(_config(connection), target or "base")
    elif steps < 0:
        command.downgrade(_config(connection), target or "base")


def _resolve(revision: str) -> str | None:
    if revision == "base":
        return None
    target = head_revision() if revision == "head" else revision
    if target not in known_revisions():
        raise Misuse(f"There is no revision {target!r}; known are {', '.join(known_revisions())}, and head and base.")
    return target


def _require_known(revision: str | None) -> None:
    if revision is not None and revision not in known_revisions():
        raise SchemaMismatch(
            f"The database is at revision {revision}, which this code does not know: a newer version of Celeriac has"
            f" migrated it. This code ends at {head_revision()}; run the newer one."
        )


def _config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, in code. Its parser interpolates %, which a path may hold."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    config.attributes["schema"] = settings.current().ledger_schema
    return config
