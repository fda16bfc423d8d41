"""Checks PostgreSQL: version, durability, clock and schema."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from sqlalchemy import Connection

from checks.result import Finding, Level, expect, fail, ok, warn
from models.engine import make_engine
from models.schema import current_revision, head_revision, known_revisions
from models.sql import sql
from settings import Settings

OLDEST_VERSION: Final = 15
SKEW_SECONDS: Final = 2.0
SEES_OTHERS: Final = sql("SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')")
SETTINGS: Final = sql("""
    SELECT name, setting FROM pg_settings
    WHERE name IN ('fsync', 'synchronous_commit', 'full_page_writes', 'max_prepared_transactions')
""")


def check(settings: Settings) -> Iterator[Finding]:
    engine = make_engine(settings.database_url)
    try:
        with engine.connect() as connection:
            yield from _check_durability(connection)
            yield _check_rights(connection)
            yield _check_clock(connection)
            yield from _check_schema(connection, settings.ledger_schema)
    finally:
        engine.dispose()


def _check_durability(connection: Connection) -> Iterator[Finding]:
    version = connection.execute(sql("SHOW server_version_num")).scalar_one()
    if int(version) // 10_000 < OLDEST_VERSION:
        yield fail("postgres.version", f"is {version}", f"use PostgreSQL {OLDEST_VERSION} or newer")
    else:
        yield ok("postgres.version", connection.execute(sql("SHOW server_version")).scalar_one())
    found: dict[str, str] = {row.name: row.setting for row in connection.execute(SETTINGS)}
    yield expect("postgres.fsync", found["fsync"], "on", "set fsync = on: without it a crash may damage the ledger")
    yield expect(
        "postgres.full_page_writes", found["full_page_writes"], "on", "set full_page_writes = on", else_=Level.WARN
    )
    if found["synchronous_commit"] == "off":
        remedy = (
            "set synchronous_commit = on for the server, the database and the role: without it a crash loses commits"
        )
        yield fail("postgres.synchronous_commit", "is off", remedy)
    else:
        yield ok("postgres.synchronous_commit", found["synchronous_commit"])
    if int(found["max_prepared_transactions"]) == 0:
        remedy = "set max_prepared_transactions = 64 and restart PostgreSQL: two-phase sinks need it"
        yield fail("postgres.max_prepared_transactions", "is 0", remedy)
    else:
        yield ok("postgres.max_prepared_transactions", found["max_prepared_transactions"])


def _check_rights(connection: Connection) -> Finding:
    """The age of other roles' transactions is in `celeriac_ledger_horizon_seconds` only with this right."""
    if connection.execute(SEES_OTHERS).scalar_one():
        return ok("postgres.rights", "the role sees the transactions of other roles")
    remedy = "as superuser: GRANT pg_read_all_stats TO the role of DATABASE_URL"
    return warn("postgres.rights", "the role does not see how old transactions of other roles are", remedy)


def _check_clock(connection: Connection) -> Finding:
    before = time.time()
    remote = float(connection.execute(sql("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
    skew = remote - (before + time.time()) / 2
    if abs(skew) > SKEW_SECONDS:
        remedy = "run NTP on both machines; Celeriac itself uses the database's clock only"
        return warn("clock", f"the database's clock differs by {skew:+.1f} s from this machine's", remedy)
    return ok("clock", f"the database's clock differs by {skew * 1000:+.0f} ms from this machine's")


def _check_schema(connection: Connection, schema: str) -> Iterator[Finding]:
    found, head = current_revision(connection), head_revision()
    if found == head:
        yield ok("schema", f"is at {head}")
    elif found is None or found in known_revisions():
        yield fail("schema", f"is at {found or 'nothing'}, this code needs {head}", "run `manage.py migrate`")
        return
    else:
        yield fail(
            "schema", f"is at {found}, which this code does not know", "upgrade Celeriac: a newer version migrated it"
        )
        return
    shift = connection.execute(sql("SELECT shift FROM ledger.ledger_clock WHERE shift <> interval '0'")).scalar()
    if shift is not None:
        remedy = f"as superuser, delete all rows of {schema}.ledger_clock"
        yield fail("ledger_clock", f"a test has shifted the ledger's clock by {shift}", remedy)
