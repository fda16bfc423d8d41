"""The ledger's record of ticks: when each was last run, whoever ran it, and that one runs at a time (P24)."""

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

# record_tick: the tick ran just now, from start to end.
RECORD_TICK = sql("""
    INSERT INTO ledger.tick (name, holder, started_at, finished_at)
    VALUES (:name, :holder, ledger.ledger_now(), ledger.ledger_now())
    ON CONFLICT (name) DO UPDATE
    SET holder = excluded.holder, started_at = excluded.started_at, finished_at = excluded.finished_at
""")

# begin_tick: nobody runs it, or whoever did was lost → running, leased to us.
BEGIN_TICK = sql("""
    INSERT INTO ledger.tick (name, holder, lease_token, lease_until, started_at)
    VALUES (:name, :holder, :token, ledger.ledger_now() + make_interval(secs => :seconds), ledger.ledger_now())
    ON CONFLICT (name) DO UPDATE
    SET holder = excluded.holder, lease_token = excluded.lease_token, lease_until = excluded.lease_until,
        started_at = excluded.started_at
    WHERE tick.lease_until IS NULL OR tick.lease_until <= (SELECT ledger.ledger_now())
    RETURNING name
""")

# end_tick: running, ours → ended now, well or with an error.
END_TICK = sql("""
    UPDATE ledger.tick SET lease_token = NULL, lease_until = NULL, finished_at = ledger.ledger_now(), error = :error
    WHERE name = :name AND lease_token = :token
""")

# tick_age: how long ago a tick was last run to its end.
TICK_AGE = sql("SELECT (SELECT ledger.ledger_now()) - finished_at FROM ledger.tick WHERE name = :name")

FAILED_TICKS = sql("SELECT name, error FROM ledger.tick WHERE error IS NOT NULL ORDER BY name")


def record_tick(connection: Connection, name: str, *, holder: str) -> None:
    connection.execute(RECORD_TICK, {"name": name, "holder": holder})


@contextmanager
def single_flight(engine: Engine, name: str, *, holder: str, seconds: float) -> Iterator[bool]:
    """False if the tick runs elsewhere. One that was lost with its process is free again after `seconds`."""
    token = uuid.uuid4()
    with engine.begin() as connection:
        values = {"name": name, "holder": holder, "token": token, "seconds": seconds}
        began = connection.execute(BEGIN_TICK, values).first() is not None
    said: str | None = None
    try:
        yield began
    except BaseException as error:
        said = Failure.of(error).message
        raise
    finally:
        if began:
            with engine.begin() as connection:
                connection.execute(END_TICK, {"name": name, "token": token, "error": said})


def failed_ticks(connection: Connection) -> dict[str, str]:
    """Those that ended with an error the last time, and what it said."""
    return {name: error for name, error in connection.execute(FAILED_TICKS)}  # noqa: C416 - rows are no pairs to mypy


def tick_age(connection: Connection, name: str) -> timedelta | None:
    """None if it was never run."""
    return connection.execute(TICK_AGE, {"name": name}).scalar()
