"""The ledger's record of ticks: when each was last run, whoever ran it."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Connection, text

# record_tick: the tick ran just now, from start to end.
RECORD_TICK = text("""
    INSERT INTO tick (name, holder, started_at, finished_at)
    VALUES (:name, :holder, ledger_now(), ledger_now())
    ON CONFLICT (name) DO UPDATE
    SET holder = excluded.holder, started_at = excluded.started_at, finished_at = excluded.finished_at
""")

# tick_age: how long ago a tick was last run to its end.
TICK_AGE = text("SELECT (SELECT ledger_now()) - finished_at FROM tick WHERE name = :name")


def record_tick(connection: Connection, name: str, *, holder: str) -> None:
    connection.execute(RECORD_TICK, {"name": name, "holder": holder})


def tick_age(connection: Connection, name: str) -> timedelta | None:
    """None if it was never run."""
    return connection.execute(TICK_AGE, {"name": name}).scalar()
