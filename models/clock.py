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

from sqlalchemy import CheckConstraint, Connection, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Base
from models.errors import Misuse
from models.sql import sql


class LedgerClock(Base):
    """By how much the ledger's clock is ahead of the server's. No row: not at all."""

    __tablename__ = "ledger_clock"
    __table_args__ = (CheckConstraint("only_row", name="only_row"),)

    only_row: Mapped[bool] = mapped_column(primary_key=True, server_default=text("true"))
    shift: Mapped[timedelta] = mapped_column(server_default=text("'0'"))


def now(connection: Connection) -> datetime:
    """What time it is for the ledger."""
    at: datetime = connection.execute(sql("SELECT ledger.ledger_now()")).scalar_one()
    return at


def resolved(moment: datetime | timedelta | None, connection: Connection) -> datetime | None:
    """A time as it is; how long ago, by this clock. Raises Misuse for what was before the year 1."""
    if not isinstance(moment, timedelta):
        return moment
    try:
        return now(connection) - moment
    except OverflowError:
        raise Misuse(f"{moment.days:,} days ago is no time: the calendar begins with the year 1.") from None
