"""Outages of PostgreSQL and of the broker cost time, and neither messages, attempts nor finished work."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

import settings
from bench.scratch import postgres_stopped
from chaos.handlers import CREATE
from chaos.programs import running, start_celery, wait_until
from child_process import ChildProcess
from embedded.home import Home
from models.clock import now
from models.engine import engine, sessions
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import NewTask, broker, submit_many
from tasks.execution.decision import LOST_IN_RESTART
from tests.tasks.own_servers import own_servers
from tests.tasks.web import get
from tests.tasks.work import rows, transitions

TASKS = 300
PROCESSES = 3  # two for handlers outside a transaction, one for the others
# With stopping and starting PostgreSQL, the outage is longer than a lease: a lease that has expired is still valid. The
# lease is long enough for a busy machine, on which a heartbeat may be two seconds late.
LEASE_SECONDS = 5
OUTAGE_SECONDS = LEASE_SECONDS
DOOMED = "doomed"  # the queue of a worker that a test kills
VARIABLES = {
    "INGEST_HANDLERS": "chaos.handlers,tests.tasks.outage_handlers",
    "INGEST_QUEUES": f"ingest,{DOOMED}",
    "INGEST_LEASE_SECONDS": str(LEASE_SECONDS),
    "INGEST_RECLAIM_INTERVAL_MS": "500",
    "OUTBOX_PUBLISH_INTERVAL_MS": "250",
    "LOG_FORMAT": "json",
}
SUCCEEDED = sql("SELECT count(*) FROM ledger.ingest_task WHERE status = 'SUCCEEDED'")
FIRST_CLAIM = sql("""
    SELECT min(created_at) FROM ledger.ingest_task_transition
    WHERE to_status = 'RUNNING' AND created_at > pg_postmaster_start_time()
""")


@dataclass(frozen=True, slots=True)
class Site:
    """Servers with one worker for tasks, one for tasks of its own queue, one for ticks, and beat."""

    settings: settings.Settings
    worker: ChildProcess
    doomed: ChildProcess
    system: ChildProcess
    metrics_port: int
    folder: Path

    @property
    def unreachable(self) -> float | None:
        """What the worker's metrics say: 1 while one of its processes waits for the ledger."""
        _, text = get(self.metrics_port, "/metrics")
        found = [line for line in text.splitlines() if line.startswith("celeriac_process_waits_for_ledger ")]
        return float(found[0].rpartition(" ")[2]) if found else None


def logged(program: ChildProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in program.output().splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("outages")
    with own_servers(VARIABLES, CREATE) as current:
        port = Home(current.celeriac_home).ports({"metrics": 0}, wished={})["metrics"]
        options = ("--without-gossip", "--without-mingle")
        work, doom, ticks = map(current.broker_queue, ("ingest", DOOMED, "system"))
        worker = start_celery(
            folder, "worker", "worker", "-c", str(PROCESSES), "-Q", work, *options, WORKER_METRICS_PORT=str(port)
        )
        doomed = start_celery(folder, "doomed", "worker", "-n", "doomed@%h", "-c", "1", "-Q", doom, *options)
        system = start_celery(folder, "system", "worker", "-n", "system@%h", "-c", "1", "-Q", ticks, *options)
        with running(worker, doomed, system, start_celery(folder, "beat", "beat")):
            yield Site(current, worker, doomed, system, port, folder)


def submitted(tasks: Sequence[NewTask]) -> list[uuid.UUID]:
    with sessions()() as session:
        ids = [each.task_id for each in submit_many(session, tasks)]
        session.commit()
    assert after_commit_publisher().wait_until_idle(20)
    return ids


def inserting(count: int) -> list[uuid.UUID]:
    """Submit tasks whose handler inserts a row and takes a little time."""
    return submitted([NewTask("chaos.effect", {"seconds": 0.01})] * count)


def succeeded() -> int:
    with engine().begin() as connection:
        return int(connection.execute(SUCCEEDED).scalar_one())


def states(ids: Sequence[uuid.UUID], columns: str = "status, attempt_count") -> Counter[tuple[Any, ...]]:
    return Counter(rows(columns, "id = ANY(:ids)", ids=list(ids)))


def effects(ids: Sequence[uuid.UUID]) -> tuple[int, int]:
    """Return the number of effects of these tasks, and of tasks that had one."""
    statement = sql("SELECT count(*), count(DISTINCT task_id) FROM public.chaos_effect WHERE task_id = ANY(:ids)")
    with engine().begin() as connection:
        return tuple(connection.execute(statement, {"ids": list(ids)}).one())


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def waiting_messages() -> int:
    return broker.depths(["ingest"])["ingest"]


@dataclass(frozen=True, slots=True)
class Outage:
    """What was seen while PostgreSQL was stopped and a worker had a full queue."""

    plain: list[uuid.UUID]  # tasks of a transactional handler
    outside: list[uuid.UUID]  # tasks whose handler ended during the outage; the second one has one attempt only
    ran: list[str]
    messages: list[int]  # in the queue, at the beginning and at the end of the outage
    first_claim_seconds: float  # from PostgreSQL's first answer, by the ledger's clock
    unreachable: list[float | None]  # the metric before, during and after
    log: list[dict[str, Any]]
    log_of_ticks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def outage(site: Site) -> Outage:
    outside = submitted(
        [NewTask("outage.outside", {"folder": str(site.folder)}, max_attempts=attempts) for attempts in (3, 1)]
    )
    ran, ended = site.folder / "ran", site.folder / "ended"
    wait_until(lambda: len(lines(ran)) == 2, "both handlers run", seconds=60)
    plain = inserting(TASKS)
    wait_until(lambda: succeeded() > TASKS / 20, "some have succeeded", seconds=60)
    unreachable = [site.unreachable]
    with postgres_stopped(site.settings):
        (site.folder / "may-end").touch()
        wait_until(lambda: len(lines(ended)) == 2, "both handlers have ended", seconds=60)
        wait_until(lambda: site.unreachable == 1, "the worker says that it waits", seconds=60)
        messages = [waiting_messages()]
        time.sleep(OUTAGE_SECONDS)
        messages.append(waiting_messages())
        unreachable.append(site.unreachable)
    engine().dispose()
    with engine().begin() as connection:
        answered_at = now(connection)
    wait_until(lambda: succeeded() == TASKS + 2, "all have succeeded", seconds=60)
    with engine().begin() as connection:
        first_claim = connection.execute(FIRST_CLAIM).scalar_one() - answered_at
    wait_until(lambda: site.unreachable == 0, "the worker says that it works again", seconds=10)
    unreachable.append(site.unreachable)
    return Outage(
        plain,
        outside,
        lines(ran),
        messages,
        first_claim.total_seconds(),
        unreachable=unreachable,
        log=logged(site.worker),
        log_of_ticks=logged(site.system),
    )


@pytest.mark.guarantee
def test_an_outage_of_postgresql_costs_no_message_no_attempt_and_no_effect(outage: Outage) -> None:
    before, after = outage.messages
    assert before == after > 0, "the worker must keep consuming nothing while it waits"
    assert states(outage.plain) == {("SUCCEEDED", 0): TASKS}
    assert effects(outage.plain) == (TASKS, TASKS)


@pytest.mark.guarantee
def test_a_handler_that_ends_while_postgresql_is_unreachable_is_not_run_again_or_charged(outage: Outage) -> None:
    history = {str(id_): transitions(id_, "created_at, to_status, actor, message") for id_ in outage.outside}
    assert sorted(outage.ran) == sorted(history), history
    assert states(outage.outside, "status, attempt_count, result") == {("SUCCEEDED", 0, "done"): 2}


def test_work_goes_on_within_two_seconds_after_postgresql_answers_again(outage: Outage) -> None:
    assert outage.first_claim_seconds <= 2


def test_an_outage_is_seen_in_the_metrics_of_a_worker_and_once_in_the_log_of_each_process(outage: Outage) -> None:
    assert outage.unreachable == [0, 1, 0]
    for words in ("The ledger is unreachable", "The ledger answers again"):
        said = Counter(line["process"] for line in outage.log if words in line["message"])
        assert said.keys(), f"no process said: {words}"
        assert set(said.values()) == {1}
        assert len(said) <= PROCESSES + 1  # the main process looks into the ledger, too


def test_no_process_of_a_worker_repeats_itself_while_postgresql_is_unreachable(outage: Outage) -> None:
    for log in (outage.log, outage.log_of_ticks):
        said = Counter((line["process"], line["logger"], line.get("event")) for line in log)
        assert {each: count for each, count in said.items() if count > 1} == {}
    assert "ledger_down" in {line["event"] for line in outage.log_of_ticks}, "ticks have no stack in the log"


@pytest.mark.guarantee
def test_all_waiting_tasks_run_soon_after_the_broker_has_lost_its_messages(site: Site) -> None:
    ids = inserting(TASKS)
    wait_until(lambda: effects(ids) > (0, 0), "some have succeeded", seconds=60)
    with redis.Redis.from_url(site.settings.broker_url) as client:
        client.flushall()
    assert effects(ids) < (TASKS, TASKS), "the flush came too late to prove anything"
    wait_until(lambda: states(ids) == {("SUCCEEDED", 0): TASKS}, "all have succeeded", seconds=60)
    assert effects(ids) == (TASKS, TASKS)


@pytest.mark.guarantee
def test_a_worker_that_is_killed_while_postgresql_is_stopped_costs_its_task_no_attempt(site: Site) -> None:
    """Its lease has expired when PostgreSQL is back. Reclaim must not take that for a task that crashes its worker."""
    folder = site.folder / DOOMED
    folder.mkdir()
    only = NewTask("outage.outside", {"folder": str(folder)}, queue=DOOMED, max_attempts=1)
    (id_,) = submitted([only])
    wait_until(lambda: lines(folder / "ran"), "its handler runs", seconds=60)
    with postgres_stopped(site.settings):
        expired_at = time.monotonic() + site.settings.ingest_lease_seconds
        site.doomed.kill()
        wait_until(lambda: time.monotonic() > expired_at, "its lease has expired", seconds=60)
    engine().dispose()
    wait_until(lambda: states([id_], "status") != {("RUNNING",): 1}, "reclaim has ended its lease", seconds=60)
    assert states([id_]) == {("QUEUED", 0): 1}
    assert transitions(id_, "to_status, message")[-1] == ("QUEUED", LOST_IN_RESTART)
    assert lines(folder / "ran") == [str(id_)]
    assert not (folder / "ended").exists()
