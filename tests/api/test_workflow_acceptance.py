"""Acceptance tests of workflows over HTTP: success, an outage of the store, repeated failure, a crashed worker."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import text

import failpoint
import settings
from api.tokens import Scope
from models.engine import engine
from outbox.after_commit_publisher import after_commit_publisher
from tasks import broker
from tasks.execution.deliver import deliver
from tasks.operations import dead_tasks
from tests.api.callers import Caller, Callers
from tests.outbox import ledger as outbox_ledger
from tests.outbox.ledger import move, woken
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import leases
from tests.tasks.work import task, transitions
from tests.workflows.flows import FLOW, KEYS, SUMMARY, create_tables, read_stored
from tests.workflows.lost_workers import reclaim_and_run, worker
from tests.workflows.outside import Outside

APPLY = "/api/workflows/apply"


@pytest.fixture
def outside(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    create_tables()
    outside = Outside()
    crm = f"http://127.0.0.1:{outside.port}/crm?allow_private=1&allow_http=1"
    monkeypatch.setenv("OUTBOX_DESTINATIONS", json.dumps({"crm": crm}))
    monkeypatch.setenv("LLM_BASE_URL", f"http://127.0.0.1:{outside.port}/v1")
    settings.current.cache_clear()
    yield outside
    outside.end()
    failpoint.arm()


@pytest.fixture
def caller(callers: Callers) -> Caller:
    return callers(Scope.WORKFLOWS_SUBMIT, Scope.TASKS_READ, Scope.OPERATE, name="ci")


def apply(caller: Caller) -> uuid.UUID:
    answer = caller.post(APPLY, json=FLOW)
    assert answer.status_code == 202
    return uuid.UUID(answer.json()["taskId"])


def read_status(caller: Caller, task_id: uuid.UUID) -> tuple[str, int]:
    """Return status and number of failures as the API shows them."""
    shown = caller.get(f"/api/tasks/{task_id}").json()
    return shown["status"], shown["retry"]["count"]


@contextmanager
def a_worker(stack: ServersOfTests) -> Iterator[None]:
    """Run the tasks of the first wake-ups that reach the broker, in a thread."""

    def run() -> None:
        wait_until(lambda: woken(stack), "the broker has a wake-up")
        ids = [uuid.UUID(one) for message in woken(stack) for one in message]
        broker.purge("ingest")
        deliver(engine(), ids)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextmanager
def store_is_down() -> Iterator[None]:
    """Hide the table that the stage `store` writes to."""
    with engine().begin() as connection:
        connection.execute(text("ALTER TABLE public.test_stored RENAME TO test_stored_elsewhere"))
    try:
        yield
    finally:
        with engine().begin() as connection:
            connection.execute(text("ALTER TABLE public.test_stored_elsewhere RENAME TO test_stored"))


def test_an_applied_workflow_is_stored_and_answers_its_output_with_nothing_left_pending(
    caller: Caller, outside: Outside, stack: ServersOfTests
) -> None:
    with a_worker(stack):
        answer = caller.post(f"{APPLY}?wait=30", json=FLOW)
    assert (answer.status_code, answer.json()["status"]) == (200, "SUCCEEDED")
    assert answer.json()["result"]["output"]["stored"] == SUMMARY
    assert read_stored() == [(f"ci:{KEYS[2]}", SUMMARY)]
    assert after_commit_publisher().wait_until_idle(20)
    assert leases() == 0
    assert outbox_ledger.rows("status") == [("SENT",)]
    assert broker.depths(["ingest"]) == {"ingest": 0}


def test_a_workflow_is_retried_while_its_store_is_down_and_completes_when_the_store_is_back(
    caller: Caller, outside: Outside, stack: ServersOfTests
) -> None:
    with store_is_down():
        id_ = apply(caller)
        deliver(engine(), [id_])
        assert read_status(caller, id_) == ("RETRYING", 1)
        move(stack, 60)
        deliver(engine(), [id_])
        assert read_status(caller, id_) == ("RETRYING", 2)
    move(stack, 300)
    deliver(engine(), [id_])
    assert read_status(caller, id_) == ("SUCCEEDED", 2)
    assert read_stored() == [(f"ci:{KEYS[2]}", SUMMARY)]
    assert outside.calls == {f"ci:{key}": 1 for key in KEYS[:2]}


def test_a_workflow_that_failed_three_times_is_dead_and_can_be_requeued_or_discarded(
    caller: Caller, outside: Outside, stack: ServersOfTests
) -> None:
    ids = [apply(caller), apply(caller)]
    with store_is_down():
        for wait_seconds in (60, 300, 0):
            for id_ in ids:
                deliver(engine(), [id_])
            move(stack, wait_seconds)
    assert [read_status(caller, id_) for id_ in ids] == [("DEAD", 3)] * 2
    shown = caller.get(f"/api/tasks/{ids[0]}").json()
    assert shown["payload"] == FLOW
    assert "test_stored" in shown["errorMessage"]
    assert "Traceback" in shown["lastError"]
    assert [to for _, to in transitions(ids[0])] == ["QUEUED", *["RUNNING", "RETRYING"] * 2, "RUNNING", "DEAD"]
    list(dead_tasks.requeue(engine(), dead_tasks.Choice(ids=[ids[0]]), actor="ops"))
    list(dead_tasks.discard(engine(), dead_tasks.Choice(ids=[ids[1]]), actor="ops"))
    deliver(engine(), ids[:1])
    assert [task(id_)["status"] for id_ in ids] == ["SUCCEEDED", "DISCARDED"]


def test_a_workflow_of_a_crashed_worker_is_reclaimed_and_continues(
    caller: Caller, outside: Outside, stack: ServersOfTests
) -> None:
    id_ = apply(caller)
    with worker(id_, "steps.after_keep=kill@2") as lost:
        assert lost.is_killed()
    assert read_status(caller, id_) == ("RUNNING", 0)
    reclaim_and_run(stack, id_)
    assert read_status(caller, id_) == ("SUCCEEDED", 1)
    assert outside.calls == {f"ci:{key}": 1 for key in KEYS[:2]}
    assert read_stored() == [(f"ci:{KEYS[2]}", SUMMARY)]
