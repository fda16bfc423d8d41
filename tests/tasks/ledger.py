"""Read from the ledger which ticks a worker has run."""

from __future__ import annotations

from celery import Celery

from models.engine import engine
from models.sql import sql
from tests.servers import wait_until

HOLDER = sql("SELECT holder FROM ledger.tick WHERE name = 'beat'")
FINISHED_AT = sql("SELECT extract(epoch FROM finished_at) FROM ledger.tick WHERE name = 'beat'")
FORGET = sql("DELETE FROM ledger.tick")


def beat_holder() -> str | None:
    """Return the worker that last ran `tasks.beat_seen`."""
    with engine().connect() as connection:
        return connection.execute(HOLDER).scalar()


def send_and_await_beat(app: Celery, *, queue: str = "system", seconds: float = 20) -> str:
    """Send `tasks.beat_seen`, wait until the ledger has recorded it, and return the worker that ran it."""
    with engine().begin() as connection:
        connection.execute(FORGET)
    app.send_task("tasks.beat_seen", queue=queue)
    wait_until(beat_holder, "beat_seen is in the ledger", seconds=seconds)
    return beat_holder() or ""


def beat_finished_at() -> float:
    """Wait until `tasks.beat_seen` is recorded; return when it ran."""
    wait_until(beat_holder, "beat_seen is in the ledger")
    with engine().connect() as connection:
        return float(connection.execute(FINISHED_AT).scalar_one())
