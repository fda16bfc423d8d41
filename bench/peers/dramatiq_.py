"""Dramatiq with its Redis broker, which acknowledges after the work. `width` is the number of threads per process."""

from __future__ import annotations

import threading
from typing import Any

import dramatiq  # type: ignore[import-not-found]
import psycopg2
from dramatiq.brokers.redis import RedisBroker  # type: ignore[import-not-found]

from bench.peers.effect import INSERT, PROCESSES, VALUE, become, broker_url, database_url, pass_gate, run_command

dramatiq.set_broker(RedisBroker(url=broker_url()))
_of_this_thread = threading.local()


@dramatiq.actor  # type: ignore[untyped-decorator]
def insert(n: int) -> None:
    cursor = _cursor()
    pass_gate()
    cursor.execute(INSERT, (n, VALUE))


def _cursor() -> Any:
    if not hasattr(_of_this_thread, "cursor"):
        connection = psycopg2.connect(database_url())
        connection.autocommit = True
        _of_this_thread.cursor = connection.cursor()
    return _of_this_thread.cursor


def submit(count: int) -> None:
    for n in range(count):
        insert.send(n)


def work(width: int, _place: int) -> None:
    become("dramatiq", "bench.peers.dramatiq_", "--processes", str(PROCESSES), "--threads", str(width))


if __name__ == "__main__":
    run_command(submit=submit, work=work)
