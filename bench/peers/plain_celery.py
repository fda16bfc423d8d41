"""Plain Celery on Redis: acks_late, no results, one connection per child. `width` is the prefetch multiplier."""

from __future__ import annotations

import threading
import time
import urllib.request
from functools import cache
from typing import Any

import psycopg2
from celery import Celery

from bench.peers.effect import (
    AT_ONCE,
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
    slow_url,
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


@app.task(name="bench.wait")
def wait() -> None:
    pass_gate()
    with urllib.request.urlopen(slow_url()) as answer:  # noqa: S310 - our own server
        answer.read()


@cache
def _cursor() -> Any:
    """Return a cursor that commits each statement, the cheapest possible transaction."""
    connection = psycopg2.connect(database_url())
    connection.autocommit = True
    return connection.cursor()


def submit(count: int) -> None:
    for n in range(count):
        insert.delay(n)


def submit_waiting(count: int) -> None:
    for _ in range(count):
        wait.delay()


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


def work(width: int, place: int) -> None:
    _become_worker(place, "-c", str(PROCESSES), "--prefetch-multiplier", str(width))


def work_in_threads(width: int, place: int) -> None:
    """One process with threads; the other process is another worker."""
    threads = ("-P", "threads", "-c", str(AT_ONCE // PROCESSES))
    _become_worker(place, *threads, "--prefetch-multiplier", str(width))


def _become_worker(place: int, *options: str) -> None:
    become(
        *("celery", "-A", "bench.peers.plain_celery", "worker", "-l", "WARNING", "-n", f"plain-{place}@%h"),
        *("--without-gossip", "--without-mingle", *options),
    )


if __name__ == "__main__":
    run_command(
        submit=submit,
        submit_waiting=submit_waiting,
        one_by_one=one_by_one,
        singles=singles,
        work=work,
        work_in_threads=work_in_threads,
    )
