"""The one hook by which tests move time (P13): for every connection and process that uses the database."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Connection

from models.sql import sql


def move_clock(connection: Connection, delta: timedelta) -> None:
    """Let the ledger's clock go ahead by `delta` more than it does, once this superuser's transaction commits."""
    connection.execute(
        sql(
            "INSERT INTO ledger.ledger_clock (shift) VALUES (:delta)"
            " ON CONFLICT (only_row) DO UPDATE SET shift = ledger_clock.shift + excluded.shift"
        ),
        {"delta": delta},
    )
