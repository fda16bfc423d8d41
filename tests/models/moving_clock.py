"""Move the ledger's clock: for every connection and process that uses the database."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Connection

from models.sql import sql


def move_clock(connection: Connection, delta: timedelta) -> None:
    """Move the clock ahead by `delta` when the transaction of this superuser commits. Moves add up."""
    connection.execute(
        sql(
            "INSERT INTO ledger.ledger_clock (shift) VALUES (:delta)"
            " ON CONFLICT (only_row) DO UPDATE SET shift = ledger_clock.shift + excluded.shift"
        ),
        {"delta": delta},
    )
