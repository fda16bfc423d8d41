"""Plain Celery on Redis: acks_late, no results, one connection per child. `width` is the prefetch multiplier."""

from __future__ import annotations

import threading
import time
from functools import cache
from typing import Any

import psycopg2
from celery import Celery

from bench.peers.effect import (
    CLIENTS,
    INSERT,
    PAUSE_SECONDS,
    PROCESSES,
    VALUE,
    become,
    broker_url,
    database_url,
    pass_gate,
    run_command,
)

app = Celery("bench-plain", broker=broker_url(), set_as_current=False)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
)


@app.task(name="bench.insert")
def insert(n: int) -> None:
    cursor = _cursor()
    pass_gate()
    cursor.execute(INSERT, (n, VALUE))


@app.task(name="bench.start")
def start(n: int) -> None:
    started_at = time.monotonic()
    _cursor().execute(INSERT, (n, repr(started_at)))


@cache
def _cursor() -> Any:
    """Return a cursor that commits each statement, the cheapest possible transaction."""
    connection = psycopg2.connect(database_url())
    connection.autocommit = True
    return connection.cursor()


def submit(count: int) -> None:
    for n in range(count):
        insert.delay(n)


def one_by_one(count: int, _in_sessions: int) -> dict[str, float]:
    """Submit from threads. Return when it began."""

    def client(place: int) -> None:
        for n in range(place, count, CLIENTS):
            insert.delay(n)

    insert.delay(-1)  # opens the connection
    threads = [threading.Thread(target=client, args=(place,)) for place in range(CLIENTS)]
    began_at = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"began_at": began_at, "submitted_at": time.monotonic()}


def singles(count: int) -> list[float]:
    """Submit single tasks. Return the time before each call."""
    began = []
    for n in range(count):
        began.append(time.monotonic())
        start.delay(n)
        time.sleep(PAUSE_SECONDS)
    return began


def work(width: int, _place: int) -> None:
    become(
        *("celery", "-A", "bench.peers.plain_celery", "worker", "-c", str(PROCESSES), "-l", "WARNING"),
        *("--prefetch-multiplier", str(width), "--without-gossip", "--without-mingle"),
    )


if __name__ == "__main__":
    run_command(submit=submit, one_by_one=one_by_one, singles=singles, work=work)
