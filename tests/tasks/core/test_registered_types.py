"""Workers register their handlers in the ledger, and the ledger knows which of them are live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaos.programs import start_worker
from models.engine import engine
from models.sql import sql
from tasks.core import registered_types
from tasks.core.holders import HOST
from tasks.core.registered_types import (
    LIVE_SECONDS,
    LiveWorker,
    Registration,
    live_workers,
    registered_queues,
    unhandled_kinds,
)
from tasks.core.registry import handlers
from tasks.worker_watch import WorkerWatch
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until
from tests.tasks.registrations import handler_of, registered

pytestmark = pytest.mark.usefixtures("stack")


def live() -> dict[str, list[str]]:
    """Return the live workers of this test. Workers that other tests share register in this ledger, too."""
    with engine().connect() as connection:
        return {each.worker: each.types for each in live_workers(connection) if not each.worker.startswith(HOST)}


def table(name: str) -> list[Any]:
    """Return the rows of a table, without the types that come with Celeriac."""
    with engine().connect() as connection:
        found = connection.execute(sql(f"SELECT * FROM ledger.{name} ORDER BY 1")).mappings()
        return [
            row for row in found if row.get("type") not in handlers() and not row.get("worker", "").startswith(HOST)
        ]


def due(registration: Registration) -> None:
    registration._due_at = 0.0
    registration.tick()


def test_a_dead_worker_is_no_longer_live_and_another_worker_deletes_its_row(stack: ServersOfTests) -> None:
    dead, alive = registered(handler_of("a"), name="dead:1"), registered(handler_of("b"), name="alive:1")
    assert live() == {"alive:1": ["b"], "dead:1": ["a"]}
    move(stack, LIVE_SECONDS - 1)
    due(alive)
    assert set(live()) == {"alive:1", "dead:1"}
    move(stack, 2)
    assert set(live()) == {"alive:1"}
    due(alive)
    assert [row["worker"] for row in table("task_worker")] == ["alive:1"]
    due(dead)  # it was only paused
    assert live() == {"alive:1": ["b"], "dead:1": ["a"]}


def test_a_worker_writes_only_when_its_sign_of_life_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    registration = registered(handler_of("a"))
    monkeypatch.setattr(registration, "engine", None)  # using it would fail
    registration.tick()


def test_a_worker_that_stops_is_forgotten_at_once_and_its_types_stay(stack: ServersOfTests) -> None:
    registration = registered(handler_of("a", max_attempts=3), ingest_queues=("ingest", "slow"))
    watch = WorkerWatch(set, runs_ticks=False, registration=registration)
    watch.stop()
    wait_until(lambda: live() == {}, "the worker is forgotten")
    due(registration)  # the thread of the watch may be in the middle of its last look
    assert live() == {}
    assert [(row["type"], row["max_attempts"]) for row in table("task_type")] == [("a", 3)]
    with engine().connect() as connection:
        assert registered_queues(connection) == ["ingest", "slow"]


def test_a_worker_stops_although_the_ledger_is_silent() -> None:
    registration = registered(handler_of("a"))
    with engine().connect() as other:
        other.execute(sql("LOCK ledger.task_worker"))
        WorkerWatch(set, runs_ticks=False, registration=registration).stop()
    wait_until(lambda: live() == {}, "the row is deleted when the ledger answers again")


def test_a_worker_of_the_system_queue_registers_types_but_does_not_count_as_one_that_runs_them() -> None:
    registration = registered(handler_of("a"), consumed=("system",))
    due(registration)
    assert live() == {}
    assert [row["type"] for row in table("task_type")] == ["a"]


def test_a_type_is_forgotten_a_month_after_its_last_worker_and_not_while_one_runs(stack: ServersOfTests) -> None:
    registered(handler_of("gone"), name="gone:1", ingest_queues=("ingest", "gone"))
    running = registered(handler_of("used"), name="running:1")
    move(stack, 3601)
    due(running)
    move(stack, registered_types.FORGET_DAYS * 86_400 - 1800)
    registered(handler_of("new"), name="new:1")
    assert [row["type"] for row in table("task_type")] == ["new", "used"]
    assert [row["queue"] for row in table("task_queue")] == ["ingest"]


def test_waiting_types_that_no_live_worker_can_run_are_found() -> None:
    with engine().begin() as connection:
        registered(handler_of("known"), name="one:1")
        registered(handler_of("misplaced"), name="two:1", consumed=("slow",), ingest_queues=("ingest", "slow"))
        for type in ("known", "misplaced", "unknown"):
            connection.execute(
                sql("SELECT ledger.ingest_submit(:type, '{}') FROM generate_series(1, 3)"), {"type": type}
            )
        assert unhandled_kinds(connection) == [("ingest", "misplaced"), ("ingest", "unknown")]


def test_a_worker_registers_when_it_starts_and_is_forgotten_when_it_stops(
    stack: ServersOfTests, tmp_path: Path
) -> None:
    variables = {"INGEST_HANDLERS": "chaos.handlers", "INGEST_QUEUES": "ingest,slow", "INGEST_MAX_ATTEMPTS": "4"}
    worker = start_worker(tmp_path, "worker", **variables)

    def found() -> list[LiveWorker]:
        with engine().connect() as connection:
            name = f"{HOST}:{worker.popen.pid}-"
            return [each for each in live_workers(connection) if each.worker.startswith(name)]

    try:
        worker.await_ready()
        wait_until(found, "the worker is registered")
        (registered,) = found()
        assert registered.queues == ["ingest", "slow"]
        assert {"workflow.execute", "chaos.effect"} <= set(registered.types)
        with engine().connect() as connection:
            effect = (
                connection.execute(sql("SELECT * FROM ledger.task_type WHERE type = 'chaos.effect'")).mappings().one()
            )
        assert (effect["queue"], effect["max_attempts"], effect["batch"], effect["priority"]) == ("ingest", 4, 10, 5)
        assert {row["queue"]: row["max_attempts"] for row in table("task_queue")}["slow"] == 4
        worker.popen.terminate()
        worker.popen.wait(20)
        assert found() == []
    finally:
        worker.kill()
