"""The ledger's clock: every statement says `(SELECT ledger_now())`; nothing else decides by the time.

The function is `clock_timestamp()` plus the shift in `ledger_clock`. That table is empty in production. Tests write a
row there and so move the time of every connection, including those of worker processes. A trigger lets only superusers
write to it. (The owner of the table could still replace the function or drop the trigger; that is DDL, which the role
of a running service should not have.)

`(SELECT …)` makes the planner evaluate the function once per statement and use its value as an index condition. The
body of the function is parsed when it is created, so it does not depend on the caller's `search_path`.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import Connection, text
from sqlalchemy.orm import Mapped, mapped_column

from models.base import Base, checks
from models.errors import Misuse
from models.sql import sql


class LedgerClock(Base):
    """How far the ledger's clock is ahead of the server's. Without a row there is no shift."""

    __table_args__ = checks(only_row="only_row")

    only_row: Mapped[bool] = mapped_column(primary_key=True, server_default=text("true"))
    shift: Mapped[timedelta] = mapped_column(server_default=text("'0'"))


def now(connection: Connection) -> datetime:
    """Return the ledger's current time."""
    at: datetime = connection.execute(sql("SELECT ledger.ledger_now()")).scalar_one()
    return at


def as_datetime(when: datetime | timedelta | None, connection: Connection) -> datetime | None:
    """Return a duration as the time that long ago, and everything else unchanged."""
    if not isinstance(when, timedelta):
        return when
    try:
        return now(connection) - when
    except OverflowError:
        raise Misuse(f"{when.days:,} days ago is before the year 1.") from None
