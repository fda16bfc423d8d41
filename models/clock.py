"""The ledger's clock (P13): every statement of the ledger says `(SELECT ledger_now())`; nothing else tells the time.

The function is `clock_timestamp()` plus the shift that `ledger_clock` holds. The table is empty in production, so the
shift is nothing; tests write a row there and thereby move the time of every connection, subprocess workers included.
A trigger refuses that to every role that is not a superuser, the owner of the table too. (The owner could still replace
the function or drop the trigger: those are DDL, which the role of a running service should not have.)

`(SELECT …)` makes the planner evaluate it once per statement and use it as an index condition; STABLE allows the index
condition to a bare call too. The body is parsed at creation, so it does not depend on the caller's `search_path`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import CheckConstraint, Connection, Table, event, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Base
from models.errors import Misuse

LEDGER_NOW: Final = """
CREATE FUNCTION ledger_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
RETURN clock_timestamp() + coalesce((SELECT shift FROM ledger_clock), interval '0')
"""

GUARD: Final = """
CREATE FUNCTION ledger_clock_guard() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
            MESSAGE = 'only a superuser (a test) may move the clock of the ledger; ' || current_user || ' is none';
    END IF;
    RETURN NULL;
END $$
"""

GUARD_TRIGGER: Final = """
CREATE TRIGGER ledger_clock_guard BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON ledger_clock
FOR EACH STATEMENT EXECUTE FUNCTION ledger_clock_guard()
"""


class LedgerClock(Base):
    """By how much the ledger's clock is ahead of the server's. No row: not at all."""

    __tablename__ = "ledger_clock"
    __table_args__ = (CheckConstraint("only_row", name="only_row"),)

    only_row: Mapped[bool] = mapped_column(primary_key=True, server_default=text("true"))
    shift: Mapped[timedelta] = mapped_column(server_default=text("'0'"))


def now(connection: Connection) -> datetime:
    """What time it is for the ledger."""
    at: datetime = connection.execute(text("SELECT ledger_now()")).scalar_one()
    return at


def resolved(moment: datetime | timedelta | None, connection: Connection) -> datetime | None:
    """A time as it is; how long ago, by this clock. Raises Misuse for what was before the year 1."""
    if not isinstance(moment, timedelta):
        return moment
    try:
        return now(connection) - moment
    except OverflowError:
        raise Misuse(f"{moment.days:,} days ago is no time: the calendar begins with the year 1.") from None


def needed_by_every_table() -> None:
    """Make the other tables wait for the clock in `create_all`: their defaults call it."""
    tables = Base.metadata.tables
    for table in tables.values():
        if table.name != LedgerClock.__tablename__:
            table.add_is_dependent_on(tables[LedgerClock.__tablename__])


@event.listens_for(LedgerClock.__table__, "after_create")
def _create_functions(_table: Table, connection: Connection, **_options: Any) -> None:
    for statement in (LEDGER_NOW, GUARD, GUARD_TRIGGER):
        connection.execute(text(statement))


@event.listens_for(LedgerClock.__table__, "before_drop")
def _drop_ledger_now(_table: Table, connection: Connection, **_options: Any) -> None:
    connection.execute(text("DROP FUNCTION ledger_now()"))


@event.listens_for(LedgerClock.__table__, "after_drop")
def _drop_guard(_table: Table, connection: Connection, **_options: Any) -> None:
    connection.execute(text("DROP FUNCTION ledger_clock_guard()"))
