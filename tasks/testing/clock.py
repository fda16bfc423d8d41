"""Moving time in a test: the ledger's clock goes on, for this transaction alone, until it is rolled back (P13)."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy.exc import ProgrammingError

from models import clock
from models.errors import Misuse
from models.sql import sql
from outbox.lease import Db
from tasks.testing.transaction import inside

INSUFFICIENT_PRIVILEGE: Final = "42501"
MOVE: Final = sql("""
    INSERT INTO ledger.ledger_clock (shift) VALUES (:by)
    ON CONFLICT (only_row) DO UPDATE SET shift = ledger_clock.shift + excluded.shift
""")


class ClockRefused(Misuse):
    """Only a superuser of the database may move the clock of the ledger."""

    code = "clock_refused"
    http_status = 403


def travel(db: Db, by: timedelta | None = None, **how_far: Any) -> datetime:
    """Move on by a timedelta, or by `minutes=5`; returns what time it is then. It goes backwards, too.

    Nobody else notices. Two tests that travel in one database at the same time wait for each other.
    """
    with inside(db) as connection:
        role = connection.execute(sql("SELECT current_user")).scalar_one()
        try:
            with connection.begin_nested():
                connection.execute(MOVE, {"by": by if by is not None else timedelta(**how_far)})
        except ProgrammingError as error:
            if getattr(error.orig, "pgcode", None) != INSUFFICIENT_PRIVILEGE:
                raise
            raise ClockRefused(
                f"The role {role!r} may not move the clock of the ledger: only a superuser of the database may. "
                "Let the tests that travel connect as one (the fixture `celeriac_db` does)."
            ) from None
        return clock.now(connection)
