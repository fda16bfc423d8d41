"""Move the ledger's clock in a test, for its transaction only, until it is rolled back."""

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
    """Only a superuser of the database may shift the ledger's clock.

    A test calls `travel` with a role that is not a superuser.
    """

    code = "clock_refused"
    remedy = "Connect the test as a superuser, as the fixture `celeriac_db` does."
    http_status = 403


def travel(db: Db, by: timedelta | None = None, **how_far: Any) -> datetime:
    """Move the clock by a timedelta or by `minutes=5`, also backwards; return the new time.

    Other transactions keep their time. Two tests that travel in one database at the same time wait for each other.
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
                f"{ClockRefused.remedy}"
            ) from None
        return clock.now(connection)
