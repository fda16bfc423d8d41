"""Keep one row per tick in the ledger: when it last ran, where, and a lease that lets one process run it at a time.

A tick that is lost with its process may be run by another one when its lease has expired (docs/protocol.md, Ticks).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

from sqlalchemy import Connection, Engine

from models.sql import sql
from tasks.core.outcomes import Failure

BEAT: Final = "beat"

# record_tick: the tick ran just now.
RECORD_TICK: Final = sql("""
    INSERT INTO ledger.tick (name, holder, started_at, finished_at)
    VALUES (:name, :holder, ledger.ledger_now(), ledger.ledger_now())
    ON CONFLICT (name) DO UPDATE
    SET holder = excluded.holder, started_at = excluded.started_at, finished_at = excluded.finished_at
""")

# begin_tick: not running, or its lease has expired → running, leased to this process.
BEGIN_TICK: Final = sql("""
    INSERT INTO ledger.tick (name, holder, lease_token, lease_until, started_at)
    VALUES (:name, :holder, :token, ledger.ledger_now() + make_interval(secs => :seconds), ledger.ledger_now())
    ON CONFLICT (name) DO UPDATE
    SET holder = excluded.holder, lease_token = excluded.lease_token, lease_until = excluded.lease_until,
        started_at = excluded.started_at
    WHERE tick.lease_until IS NULL OR tick.lease_until <= (SELECT ledger.ledger_now())
    RETURNING name
""")

# renew_tick: running under this token → leased to it for longer.
RENEW_TICK: Final = sql("""
    UPDATE ledger.tick SET lease_until = ledger.ledger_now() + make_interval(secs => :seconds)
    WHERE name = :name AND lease_token = :token
    RETURNING name
""")

# end_tick: running under this token → finished now, with its error if there was one.
END_TICK: Final = sql("""
    UPDATE ledger.tick SET lease_token = NULL, lease_until = NULL, finished_at = ledger.ledger_now(), error = :error
    WHERE name = :name AND lease_token = :token
""")

TICK_AGE: Final = sql("SELECT (SELECT ledger.ledger_now()) - finished_at FROM ledger.tick WHERE name = :name")
FAILED_TICKS: Final = sql("SELECT name, error FROM ledger.tick WHERE error IS NOT NULL ORDER BY name")


def record_tick(connection: Connection, name: str, *, holder: str) -> None:
    connection.execute(RECORD_TICK, {"name": name, "holder": holder})


@contextmanager
def single_flight(
    engine: Engine, name: str, *, holder: str, seconds: float, token: uuid.UUID | None = None
) -> Iterator[bool]:
    """Lease the tick for `seconds` at most, and record its end. Yield False if another process runs it.

    A caller that needs longer gives a token, and renews the lease with it.
    """
    values = {"name": name, "token": token or uuid.uuid4()}
    with engine.begin() as connection:
        began = connection.execute(BEGIN_TICK, {**values, "holder": holder, "seconds": seconds}).first() is not None
    message: str | None = None
    try:
        yield began
    except BaseException as error:
        message = Failure.of(error).message
        raise
    finally:
        if began:
            with engine.begin() as connection:
                connection.execute(END_TICK, {**values, "error": message})


def renew_tick(engine: Engine, name: str, *, token: uuid.UUID, seconds: float) -> bool:
    """Lease the tick for `seconds` from now. Return False if another process has taken it over."""
    with engine.begin() as connection:
        values = {"name": name, "token": token, "seconds": seconds}
        return connection.execute(RENEW_TICK, values).first() is not None


def failed_ticks(connection: Connection) -> dict[str, str]:
    """Return the error of each tick whose last run failed."""
    return {row.name: row.error for row in connection.execute(FAILED_TICKS)}


def tick_age(connection: Connection, name: str) -> timedelta | None:
    """Return how long ago the tick last finished, or None if it never did."""
    return connection.execute(TICK_AGE, {"name": name}).scalar()
