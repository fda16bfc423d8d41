"""The demo: tasks run while a worker is killed and the broker forgets everything; each effect is there once."""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx2
import psutil
import redis

from bench.scratch import scratch_servers
from chaos.handlers import CREATE
from chaos.programs import Program, running, wait_until, worker
from embedded.home import Home
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import submitter
from settings import Settings
from tasks import NewTask, submit_many

# Impatient, so that half a minute is enough: a lost worker is missed after 3 s, a lost wake-up after 1 s.
IMPATIENT: Final = {
    "INGEST_HANDLERS": "chaos.handlers",
    "INGEST_LEASE_SECONDS": "3",
    "INGEST_WAKEUP_GRACE_MS": "1000",
    "INGEST_RECLAIM_INTERVAL_MS": "500",
    "INGEST_RETRY_BASE_BACKOFF_MS": "100",
    "OUTBOX_SUBMIT_LEASE_SECONDS": "1",
    "OUTBOX_PUBLISH_INTERVAL_MS": "250",
}
SUCCEEDED: Final = sql("SELECT count(*) FROM ledger.ingest_task WHERE status = 'SUCCEEDED'")
EFFECTS: Final = sql("SELECT count(*), count(DISTINCT task_id) FROM chaos_effect")
AGAIN: Final = sql("""
    SELECT count(*) FROM ledger.ingest_task_transition WHERE from_status = 'RUNNING' AND to_status <> 'SUCCEEDED'
""")
REFUSED: Final = sql("SELECT count(*) FROM ledger.task_audit")
HELD: Final = sql("SELECT count(*) FROM ledger.task_lease WHERE regexp_replace(holder, '-[^-]*$', '') = ANY(:holders)")


@dataclass(frozen=True, slots=True)
class Counted:
    """What the ledger and the table of effects say at the end."""

    submitted: int
    succeeded: int
    effects: int
    distinct_effects: int
    taken_over: int  # tasks that were given back or taken over on the way
    duplicates: int  # deliveries that the guard refused
    late: int  # writes of lost holders that were refused

    @property
    def is_right(self) -> bool:
        return self.submitted == self.succeeded == self.effects == self.distinct_effects


def demo(tell: Callable[[str], None], *, count: int = 500, seconds: float = 60) -> Counted:
    before = {name: os.environ.get(name) for name in IMPATIENT}
    os.environ.update(IMPATIENT)
    try:
        with tempfile.TemporaryDirectory(prefix="celeriac-demo-") as folder, scratch_servers() as settings:
            return _run(Path(folder), settings, tell, count, seconds)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _run(folder: Path, settings: Settings, tell: Callable[[str], None], count: int, seconds: float) -> Counted:
    with engine().begin() as connection:
        connection.execute(CREATE)
    tell("two workers and beat start")
    ports = _free_ports(settings, 2)
    victim = worker(folder, "victim", WORKER_METRICS_PORT=str(ports[0]))
    survivor = worker(folder, "survivor", WORKER_METRICS_PORT=str(ports[1]))
    beat = Program(folder, "beat", "beat")
    with running(victim, survivor, beat):
        tell(f"{count} tasks are submitted")
        ids = _submit(count)
        wait_until(lambda: _one(SUCCEEDED) > count // 5, "a fifth of them succeeded", seconds=seconds)
        wait_until(lambda: _holds_a_lease(victim), "the worker holds a lease", seconds=seconds)
        victim.kill()
        tell(f"{_one(SUCCEEDED)} have succeeded; a worker was killed in the middle of its work")
        wait_until(lambda: _one(SUCCEEDED) > count // 3, "a third of them succeeded", seconds=seconds)
        tell(f"{_one(SUCCEEDED)} have succeeded; the broker forgets everything (FLUSHALL)")
        with redis.Redis.from_url(settings.broker_url) as broker:
            broker.flushall()
        tell("the same tasks are delivered twice more, as a broker may")
        _deliver_again(ids)
        wait_until(lambda: _one(SUCCEEDED) == count, f"all {count} succeeded", seconds=seconds)
        duplicates = _skipped(ports[1])
    effects, distinct = _row(EFFECTS)
    return Counted(count, _one(SUCCEEDED), effects, distinct, _one(AGAIN), duplicates, _one(REFUSED))


def _holds_a_lease(program: Program) -> bool:
    names = [f"{socket.gethostname()}:{child.pid}" for child in psutil.Process(program.popen.pid).children()]
    with engine().connect() as connection:
        return bool(connection.execute(HELD, {"holders": names}).scalar_one())


def _submit(count: int) -> list[uuid.UUID]:
    with sessions()() as session:
        new = [NewTask("chaos.effect", {"seconds": 0.02}) for _ in range(count)]
        ids = [each.task_id for each in submit_many(session, new)]
        session.commit()
    submitter().flush(10)
    return ids


def _deliver_again(ids: list[uuid.UUID]) -> None:
    from tasks.celery import app  # noqa: PLC0415 - reads the settings of the servers that run now

    for start in range(0, len(ids), 10):
        for _ in range(2):
            app.send_task("tasks.ingest", args=([str(one) for one in ids[start : start + 10]],), queue="ingest")


def _one(statement: object) -> int:
    return int(_row(statement)[0])


def _row(statement: object) -> tuple[int, ...]:
    with engine().connect() as connection:
        return tuple(connection.execute(statement).one())  # type: ignore[call-overload]


def _skipped(port: int) -> int:
    """What the surviving worker says that its guard refused."""
    said = httpx2.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    found = [line for line in said.splitlines() if line.startswith('ingest_task_process_total{result="skipped"}')]
    return int(float(found[0].rpartition(" ")[2])) if found else 0


def _free_ports(settings: Settings, count: int) -> list[int]:
    home = Home(settings.celeriac_home)
    wanted = {f"metrics-{number}": 0 for number in range(count)}
    return list(home.ports(wanted, wished={}).values())
