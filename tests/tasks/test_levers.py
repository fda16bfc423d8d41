"""An operator handles a backlog with a real worker, over HTTP: alert, scale, pause, restart, resume, shrink."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from fastapi.testclient import TestClient

import settings
from api.app import app
from chaos.programs import start_celery
from child_process import ChildProcess
from models.engine import engine
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import broker, ticks
from tests.api.callers import Caller, Callers, expect_error
from tests.servers import wait_until
from tests.tasks.lever_handlers import CREATE
from tests.tasks.own_servers import own_servers
from tests.tasks.work import rows

VARIABLES = {
    "INGEST_HANDLERS": "tests.tasks.lever_handlers",
    "INGEST_LEASE_SECONDS": "60",
    "BACKLOG_ALERT_THRESHOLD": "3",
    "BACKLOG_POLICY": "scale",
    "BACKLOG_MAX_PROCESSES": "2",
}


@pytest.fixture(scope="module")
def servers() -> Iterator[settings.Settings]:
    with own_servers(VARIABLES, CREATE) as current:
        yield current


@pytest.fixture
def caller(servers: settings.Settings) -> Iterator[Caller]:
    with TestClient(app, raise_server_exceptions=False) as client:
        yield Callers(client)()


@pytest.fixture
def start(servers: settings.Settings, tmp_path: Path) -> Iterator[Any]:
    """Return a function that starts a worker with one process; all are killed at the end of the test."""
    started: list[ChildProcess] = []

    def start(name: str) -> ChildProcess:
        options = ("-c", "1", "-n", f"{name}@%h", "--without-gossip", "--without-mingle")
        started.append(start_celery(tmp_path, name, "worker", *options))
        started[-1].await_ready()
        return started[-1]

    yield start
    for program in started:
        program.kill()


def set_gate(*, is_open: bool) -> None:
    with engine().begin() as connection:
        change = "INSERT INTO public.lever_gate VALUES (true)" if is_open else "DELETE FROM public.lever_gate"
        connection.execute(sql(change))


def runs() -> list[tuple[uuid.UUID, int]]:
    with engine().begin() as connection:
        return [tuple(row) for row in connection.execute(sql("SELECT task_id, pid FROM public.lever_run"))]


def submit(caller: Caller, count: int) -> None:
    for _ in range(count):
        answer = caller.post("/api/tasks", json={"type": "lever.held", "payload": {}})
        assert answer.status_code == 202, answer.text
    assert after_commit_publisher().wait_until_idle(20)


def queue_of(caller: Caller) -> Any:
    (found,) = caller.get("/internal/queues").json()["queues"]
    return found


def workers(caller: Caller) -> dict[str, int | None]:
    """Return the number of processes by worker. A worker that was killed is listed for a while."""
    return {each["worker"]: each["processes"] for each in queue_of(caller)["workers"]}


def sizes(caller: Caller, *, but: Collection[str] = ()) -> list[int | None]:
    return [processes for worker, processes in workers(caller).items() if worker not in but]


@pytest.mark.guarantee
def test_an_operator_scales_and_pauses_a_queue_that_is_too_long_and_every_task_runs_once(
    caller: Caller, start: Any
) -> None:
    worker = start("first")
    submit(caller, 6)
    wait_until(lambda: len(runs()) == 1, "one process runs one task")
    assert ticks.run("reclaim")["backlogAlerts"] == 1
    assert queue_of(caller)["alertSince"]
    assert 'celeriac_backlog_alert{queue="ingest"} 1.0' in caller.get("/metrics").text
    wait_until(lambda: len({pid for _, pid in runs()}) == 2, "the alert has added a process")

    assert caller.post("/internal/workers/scale", json={"processes": 3}).status_code == 202
    wait_until(lambda: len({pid for _, pid in runs()}) == 3, "three processes run tasks")
    assert queue_of(caller)["running"] == 3

    caller.post("/internal/queues/ingest/pause")
    caller.post("/internal/queues/ingest/pause", json={"intake": True})
    refused = caller.post("/api/tasks", json={"type": "lever.held", "payload": {}})
    expect_error(refused, 429, "queue_paused")
    set_gate(is_open=True)
    wait_until(lambda: queue_of(caller)["running"] == 0, "what was running has finished")
    wait_until(lambda: broker.depths(["ingest"]) == {"ingest": 0}, "the worker has taken the other messages")

    before = set(workers(caller))
    worker.kill()
    start("second")
    wait_until(lambda: 3 in sizes(caller, but=before), "the new worker has three processes, too")
    for name in ("relay", "reclaim"):
        ticks.run(name)
    assert len(runs()) == 3
    assert sorted(status for status, _ in rows()) == ["QUEUED"] * 3 + ["SUCCEEDED"] * 3

    caller.post("/internal/queues/ingest/resume")
    wait_until(lambda: set(rows()) == {("SUCCEEDED", 0)}, "every task has run")
    assert len(runs()) == len({task for task, _ in runs()}) == 6
    assert ticks.run("reclaim")["backlogAlerts"] == 1
    assert queue_of(caller)["alertSince"] is None
    assert 'celeriac_backlog_alert{queue="ingest"} 0.0' in caller.get("/metrics").text

    set_gate(is_open=False)
    submit(caller, 3)
    wait_until(lambda: queue_of(caller)["running"] == 3, "all processes are busy")
    busy = {pid for _, pid in runs()[6:]}
    assert len(busy) == 3
    caller.post("/internal/workers/scale", json={"processes": 1})
    set_gate(is_open=True)
    wait_until(lambda: 1 in sizes(caller), "the worker has one process")
    wait_until(lambda: set(rows()) == {("SUCCEEDED", 0)}, "no task was interrupted")
    assert len(runs()) == len({task for task, _ in runs()}) == 9
    submit(caller, 2)
    wait_until(lambda: rows() == [("SUCCEEDED", 0)] * 11, "the process that is left runs tasks")

    caller.post("/internal/workers/scale", json={})
    set_gate(is_open=False)
    submit(caller, 5)
    assert ticks.run("reclaim")["backlogAlerts"] == 1
    wait_until(lambda: sizes(caller, but=before) == [2], "the alert alone has added a process")
    set_gate(is_open=True)
    wait_until(lambda: rows() == [("SUCCEEDED", 0)] * 16, "the backlog is gone")
    assert ticks.run("reclaim")["backlogAlerts"] == 1
    wait_until(lambda: sizes(caller, but=before) == [1], "the end of the alert has taken it away again")


def test_a_queue_that_is_too_long_refuses_tasks_until_its_worker_has_caught_up_and_the_pager_is_told(
    caller: Caller, start: Any, servers: settings.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pager = f"{servers.redis_url.replace('redis:', 'redis-stream:', 1)}?stream=pager"
    variables = {"OUTBOX_DESTINATIONS": json.dumps({"pager": pager}), "BACKLOG_NOTIFY": "pager"}
    for name, value in {**variables, "BACKLOG_POLICY": "refuse"}.items():
        monkeypatch.setenv(name, value)
    settings.current.cache_clear()
    set_gate(is_open=False)
    start("only")
    before = len(runs())
    submit(caller, 5)
    wait_until(lambda: len(runs()) > before, "the worker runs a task, and the others wait")
    assert ticks.run("reclaim")["backlogAlerts"] == 1
    refused = caller.post("/api/tasks", json={"type": "lever.held", "payload": {}})
    expect_error(refused, 429, "backlog_full")
    assert refused.headers["Retry-After"] == "30"
    ticks.run("relay")
    assert told(servers) == ["backlog_alert_raised"]

    set_gate(is_open=True)
    wait_until(lambda: set(rows()) == {("SUCCEEDED", 0)}, "the worker has caught up")
    assert len(runs()) == before + 5
    assert ticks.run("reclaim")["backlogAlerts"] == 1
    submit(caller, 1)
    ticks.run("relay")
    assert told(servers) == ["backlog_alert_raised", "backlog_alert_cleared"]


def told(servers: settings.Settings) -> list[str]:
    """Return the events that the pager was told."""
    with redis.Redis.from_url(servers.redis_url, decode_responses=True) as client:
        return [json.loads(fields["payload"])["event"] for _, fields in client.xrange("pager")]
