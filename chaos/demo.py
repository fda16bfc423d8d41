"""The demo: tasks run while a worker is killed and the broker loses its messages; every effect happens once."""

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
from chaos.programs import running, start_celery, start_worker, wait_until
from child_process import ChildProcess
from embedded.home import Home
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from settings import Settings
from tasks import NewTask, submit_many

# Short times, so that the demo takes half a minute: a lost worker is noticed after 3 s, a lost wake-up after 1 s.
SHORT_TIMES: Final = {
    "INGEST_HANDLERS": "chaos.handlers",
    "INGEST_LEASE_SECONDS": "3",
    "INGEST_WAKEUP_GRACE_MS": "1000",
    "INGEST_RECLAIM_INTERVAL_MS": "500",
    "INGEST_RETRY_BASE_BACKOFF_MS": "100",
    "OUTBOX_SUBMIT_LEASE_SECONDS": "1",
    "OUTBOX_PUBLISH_INTERVAL_MS": "250",
}
SUCCEEDED: Final = sql("SELECT count(*) FROM ledger.ingest_task WHERE status = 'SUCCEEDED'")
EFFECTS: Final = sql("SELECT count(*), count(DISTINCT task_id) FROM public.chaos_effect")
INTERRUPTED: Final = sql("""
    SELECT count(*) FROM ledger.ingest_task_transition WHERE from_status = 'RUNNING' AND to_status <> 'SUCCEEDED'
""")
REFUSED: Final = sql("SELECT count(*) FROM ledger.task_audit")
HELD: Final = sql("SELECT count(*) FROM ledger.task_lease WHERE regexp_replace(holder, '-[^-]*$', '') = ANY(:holders)")


@dataclass(frozen=True, slots=True)
class Counts:
    """The final counts of the ledger and of the table of effects."""

    submitted: int
    succeeded: int
    effects: int
    distinct_effects: int
    interrupted: int  # attempts that were released or reclaimed before they succeeded
    duplicates: int  # deliveries that the claim refused
    late: int  # writes of workers that had lost their lease; all were refused

    @property
    def is_right(self) -> bool:
        return self.submitted == self.succeeded == self.effects == self.distinct_effects


def demo(report: Callable[[str], None], *, count: int = 500, seconds: float = 60) -> Counts:
    """Run the demo on temporary servers. Raise NotInTime if a step takes longer than `seconds`."""
    before = {name: os.environ.get(name) for name in SHORT_TIMES}
    os.environ.update(SHORT_TIMES)
    try:
        with tempfile.TemporaryDirectory(prefix="celeriac-demo-") as folder, scratch_servers() as settings:
            return _run(Path(folder), settings, report, count, seconds)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _run(folder: Path, settings: Settings, report: Callable[[str], None], count: int, seconds: float) -> Counts:
    with engine().begin() as connection:
        connection.execute(CREATE)
    report("starting two workers and beat")
    ports = _free_ports(settings, 2)
    victim = start_worker(folder, "victim", WORKER_METRICS_PORT=str(ports[0]))
    survivor = start_worker(folder, "survivor", WORKER_METRICS_PORT=str(ports[1]))
    beat = start_celery(folder, "beat", "beat")
    with running(victim, survivor, beat):
        report(f"submitting {count} tasks")
        ids = _submit(count)
        wait_until(lambda: _one(SUCCEEDED) > count // 5, "a fifth of them succeeded", seconds=seconds)
        wait_until(lambda: _holds_a_lease(victim), "the worker holds a lease", seconds=seconds)
        victim.kill()
        report(f"{_one(SUCCEEDED)} have succeeded; killed a worker in the middle of its work")
        wait_until(lambda: _one(SUCCEEDED) > count // 3, "a third of them succeeded", seconds=seconds)
        report(f"{_one(SUCCEEDED)} have succeeded; deleting everything in the broker (FLUSHALL)")
        with redis.Redis.from_url(settings.broker_url) as broker:
            broker.flushall()
        report("delivering the same tasks twice more, as a broker may")
        _deliver_again(ids, settings.broker_queue("ingest"))
        wait_until(lambda: _one(SUCCEEDED) == count, f"all {count} succeeded", seconds=seconds)
        duplicates = _skipped(ports[1])
    effects, distinct = _row(EFFECTS)
    return Counts(count, _one(SUCCEEDED), effects, distinct, _one(INTERRUPTED), duplicates, _one(REFUSED))


def _holds_a_lease(program: ChildProcess) -> bool:
    names = [f"{socket.gethostname()}:{child.pid}" for child in psutil.Process(program.pid).children()]
    with engine().connect() as connection:
        return bool(connection.execute(HELD, {"holders": names}).scalar_one())


def _submit(count: int) -> list[uuid.UUID]:
    with sessions()() as session:
        new = [NewTask("chaos.effect", {"seconds": 0.02}) for _ in range(count)]
        ids = [each.task_id for each in submit_many(session, new)]
        session.commit()
    after_commit_publisher().wait_until_idle(10)
    return ids


def _deliver_again(ids: list[uuid.UUID], queue: str) -> None:
    from tasks.celery import app  # noqa: PLC0415 - reads the addresses of the temporary servers

    for start in range(0, len(ids), 10):
        for _ in range(2):
            app.send_task("tasks.ingest", args=([str(one) for one in ids[start : start + 10]],), queue=queue)


def _one(statement: object) -> int:
    return int(_row(statement)[0])


def _row(statement: object) -> tuple[int, ...]:
    with engine().connect() as connection:
        return tuple(connection.execute(statement).one())  # type: ignore[call-overload]


def _skipped(port: int) -> int:
    """Return how many deliveries the surviving worker has refused, from its metrics."""
    said = httpx2.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    found = [line for line in said.splitlines() if line.startswith('celeriac_process_claims_total{verdict="skipped"}')]
    return int(float(found[0].rpartition(" ")[2])) if found else 0


def _free_ports(settings: Settings, count: int) -> list[int]:
    home = Home(settings.celeriac_home)
    wanted = {f"metrics-{number}": 0 for number in range(count)}
    return list(home.ports(wanted, wished={}).values())
