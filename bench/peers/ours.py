"""Celeriac: a real worker on the queue `ingest`, with all guarantees.

No relay and no beat runs during the measurement of `bench ingest`: wake-ups are leased at insert and published by the
submitting process. A relay publishes the wake-ups that this process left behind before the workers start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

import settings
from bench.peers.effect import CLIENTS, PAUSE_SECONDS, PROCESSES, become, run_command
from bench.peers.our_handlers import LONG_SECONDS, SHORT_SECONDS
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from outbox.relay import Relay
from tasks import NewTask, submit_many
from tasks import submit as submit_one

CHUNK: Final = 1000
CELERY: Final = ("celery", "-A", "tasks")
QUIET: Final = ("-l", "WARNING")
UNSENT: Final = sql("SELECT count(*) FROM ledger.outbox_event WHERE status <> 'SENT'")


def gates() -> None:
    """Submit one task per process that waits at the gate, before all other tasks of the queue."""
    _submit_now([NewTask("bench.gate")] * PROCESSES)


def hold(gate: str) -> None:
    """Submit one task per process that waits at this gate of `bench recovery`."""
    _submit_now([NewTask("bench.hold", {"gate": gate})] * PROCESSES)


def lost(round: str, count: int) -> None:
    """Submit the tasks of one round of `bench recovery`, which are lost with the process that runs them."""
    _submit_now([NewTask("bench.lost", {"round": round, "n": n}) for n in range(count)])


def submit(count: int, type: str, first: int = 0, keys: int = 0) -> dict[str, float]:
    """Submit in transactions of a thousand tasks. Return the seconds this took, without the time of the broker."""
    began_at = time.monotonic()
    with sessions()() as session:
        for start in range(first, first + count, CHUNK):
            numbers = range(start, min(start + CHUNK, first + count))
            submit_many(
                session, [NewTask(type, {"n": n}, partition_key=f"key {n % keys}" if keys else None) for n in numbers]
            )
            session.commit()
    seconds = time.monotonic() - began_at
    _publish_all()
    return {"seconds": seconds}


def naps(count: int, every: int, long: int) -> None:
    """Submit tasks of the async handler of `bench async`. Of each `every` tasks the first `long` ones are long."""
    payloads = [{"seconds": LONG_SECONDS if n % every < long else SHORT_SECONDS} for n in range(count)]
    for start in range(0, count, CHUNK):
        _submit_now([NewTask("bench.nap", payload) for payload in payloads[start : start + CHUNK]])


def one_by_one(count: int, in_sessions: int) -> dict[str, float]:
    """Submit from threads, one transaction per task, in the engine or in a session. Return when it began."""

    def client(place: int) -> None:
        ledger = engine()
        for n in range(place, count, CLIENTS):
            if in_sessions:
                with sessions().begin() as session:
                    submit_one(session, "bench.task", {"n": n})
            else:
                submit_one(ledger, "bench.task", {"n": n})

    submit_one(engine(), "bench.task", {"n": -1})  # opens connections
    threads = [threading.Thread(target=client, args=(place,)) for place in range(CLIENTS)]
    began_at = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    submitted_at = time.monotonic()
    _publish_all()
    return {"began_at": began_at, "submitted_at": submitted_at}


def singles(count: int) -> list[float]:
    """Submit single tasks. Return the time before each transaction."""
    began = []
    for n in range(count):
        began.append(time.monotonic())
        with sessions().begin() as session:
            submit_one(session, "bench.start", {"n": n})
        time.sleep(PAUSE_SECONDS)
    _publish_all()
    return began


def work(width: int, place: int) -> None:
    _become_worker("ingest", PROCESSES, "-n", f"ingest-{place}@%h", "--prefetch-multiplier", str(width))


def system() -> None:
    """Run the ticks that beat sends."""
    _become_worker("system", 1, "-n", "system@%h")


def beat() -> None:
    become(*CELERY, "beat", *QUIET)


def _become_worker(queue: str, processes: int, *options: str) -> None:
    queues = ("-Q", settings.current().broker_queue(queue))
    quick_start = ("--without-gossip", "--without-mingle")
    become(*CELERY, "worker", *queues, "-c", str(processes), *QUIET, *quick_start, *options)


def _submit_now(tasks: Sequence[NewTask]) -> None:
    with sessions()() as session:
        submit_many(session, tasks)
        session.commit()
    _publish_all()


def _publish_all() -> None:
    after_commit_publisher().wait_until_idle(60)
    relay = Relay.of(settings.current())
    while _unsent():
        relay.tick(10)
        time.sleep(0.1)
    relay.close()


def _unsent() -> int:
    with engine().connect() as connection:
        return int(connection.execute(UNSENT).scalar_one())


if __name__ == "__main__":
    run_command(
        gates=gates,
        hold=hold,
        lost=lost,
        submit=submit,
        naps=naps,
        one_by_one=one_by_one,
        singles=singles,
        work=work,
        system=system,
        beat=beat,
    )
