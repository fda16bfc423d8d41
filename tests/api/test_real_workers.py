"""The acceptance scenarios of the source documents, over HTTP and with real workers (docs/seeds.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import settings
from api.tokens import Scope
from chaos.programs import start_worker
from child_process import ChildProcess
from models.engine import engine
from tasks import broker, ticks
from tests.api.callers import Caller, Callers
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import leases
from tests.tasks.lost_workers import LEASE, later
from tests.workflows.flows import FLOW, KEYS, SUMMARY, create_tables, read_stored
from tests.workflows.outside import Outside

APPLY, SUSPENDED = "/api/workflows/apply", "/internal/tasks/suspended"
UPLOAD = "/api/knowledge/documents/upload-async"
Start = Callable[[str], ChildProcess]


@pytest.fixture
def outside() -> Iterator[Outside]:
    create_tables()
    outside = Outside()
    yield outside
    outside.end()


@pytest.fixture
def start(stack: ServersOfTests, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts `celery -A tasks worker`. The test runs the ticks, because it moves the clock."""
    started: list[ChildProcess] = []

    def start(name: str, **variables: str) -> ChildProcess:
        started.append(start_worker(tmp_path, name, WORKER_RUN_TICKS="false", **variables))
        started[-1].await_ready()
        return started[-1]

    yield start
    for each in started:
        each.kill()


def set_variables(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Set variables for this process, in which the API runs, and for the workers that it starts."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings.current.cache_clear()


def await_so(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition is true, and run the ticks meanwhile, as beat would."""

    def is_so() -> bool:
        ticks.run("relay")
        ticks.run("reclaim")
        return condition()

    wait_until(is_so, what, seconds=60)


def await_status(caller: Caller, address: str, status: str, failures: int) -> dict[str, Any]:
    """Wait until the API shows this status and number of failures, and return the task."""
    shown: dict[str, Any] = {}

    def is_so() -> bool:
        shown.update(caller.get(address).json())
        return (shown["status"], shown["attemptCount"]) == (status, failures)

    await_so(is_so, f"the task is {status}")
    return shown


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


@pytest.mark.guarantee
def test_workflows_over_http_survive_an_outage_of_the_store_repeated_failures_and_a_killed_worker(
    callers: Callers, outside: Outside, stack: ServersOfTests, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    crm = f"http://127.0.0.1:{outside.port}/crm?allow_private=1&allow_http=1"
    set_variables(
        monkeypatch,
        OUTBOX_DESTINATIONS=json.dumps({"crm": crm}),
        LLM_BASE_URL=f"http://127.0.0.1:{outside.port}/v1",
        INGEST_HANDLERS="tests.workflows.flows",
    )
    client = callers(Scope.WORKFLOWS_SUBMIT, Scope.TASKS_READ, name="ci")
    operator = callers(Scope.OPERATE, name="ops")
    worker = start("first")

    # 1. All is well: the caller gets the real output, and nothing is left pending.
    answer = client.post(APPLY, json=FLOW, headers={"Prefer": "wait=30"})
    assert (answer.status_code, answer.json()["status"]) == (200, "SUCCEEDED")
    assert answer.json()["result"]["output"]["stored"] == SUMMARY
    assert read_stored() == [(f"ci:{KEYS[2]}", SUMMARY)]
    await_so(lambda: leases() == 0 and broker.depths(["ingest"]) == {"ingest": 0}, "nothing is pending")
    counts = operator.get("/internal/tasks/stats").json()
    assert [counts[word] for word in ("pending", "processing", "retry", "suspended")] == [0, 0, 0, 0]

    # 2. The store is down: the task waits for its retry, and completes by itself when the store is back.
    with store_is_down():
        address = client.post(APPLY, json={**FLOW, "workflowId": "second"}).headers["location"]
        await_status(client, address, "RETRYING", 1)
        listed = client.get("/api/tasks", params={"status": "retry"}).json()["tasks"]
        assert [each["taskId"] for each in listed] == [address.rpartition("/")[2]]
    move(stack, 60)
    await_status(client, address, "SUCCEEDED", 1)
    assert len(read_stored()) == 2

    # 3. Three failures: suspended. An operator looks at them, runs one again and gives the other one up.
    with store_is_down():
        addresses = [client.post(APPLY, json=FLOW).headers["location"] for _ in range(2)]
        for wait_seconds, status, failures in ((60, "RETRYING", 1), (300, "RETRYING", 2), (0, "DEAD", 3)):
            for each in addresses:
                await_status(client, each, status, failures)
            move(stack, wait_seconds)
    again, given_up = (each.rpartition("/")[2] for each in addresses)
    suspended = operator.get(SUSPENDED, params={"type": "workflow.execute"}).json()["tasks"]
    assert {each["taskId"] for each in suspended} == {again, given_up}
    assert all("test_stored" in each["errorMessage"] for each in suspended)
    for action, id_ in (("requeue", again), ("discard", given_up)):
        body = {"filter": {"ids": [id_]}, "reason": "looked at it"}
        assert operator.post(f"{SUSPENDED}/{action}", json=body).json()["changed"] == 1
    await_status(client, addresses[0], "SUCCEEDED", 0)
    await_status(client, addresses[1], "DISCARDED", 3)
    assert operator.get(SUSPENDED).json()["tasks"] == []

    # 4. The worker is killed in the middle of a stage: another one takes the task over.
    outside.before_answering = worker.kill
    address = client.post(APPLY, json={**FLOW, "workflowId": "fourth"}).headers["location"]
    wait_until(lambda: worker.exit_code() is not None, "the worker was killed")
    assert client.get(address).json()["status"] == "RUNNING"
    outside.before_answering = lambda: None
    start("second")
    later(stack, LEASE + 1)
    await_status(client, address, "RETRYING", 1)
    move(stack, 60)
    await_status(client, address, "SUCCEEDED", 1)
    assert outside.calls["ci:fourth:fetch"] == 2
    assert [status for _, status in _events(client, address)][-2:] == ["RUNNING", "SUCCEEDED"]


def test_a_document_that_cannot_be_stored_is_retried_then_dead_with_a_dead_letter(
    callers: Callers, stack: ServersOfTests, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variables of the source document, as they are."""
    set_variables(
        monkeypatch,
        CHROMA_BASE_URL="http://127.0.0.1:65530",
        INGEST_REDIS_MAX_ATTEMPTS="2",
        INGEST_REDIS_RETRY_BASE_BACKOFF_MS="0",
        INGEST_REDIS_RETRY_MAX_BACKOFF_MS="0",
        INGEST_REDIS_RECLAIM_IDLE_MS="0",
        INGEST_REDIS_DLQ_STREAM_KEY="ingest:tasks:dlq",
    )
    client = callers(Scope.DOCUMENTS_WRITE, Scope.TASKS_READ)
    operator = callers(Scope.OPERATE)
    answer = client.post(UPLOAD, files={"file": ("rules.txt", b"the lease", "text/plain")})
    address, task_id = answer.headers["location"], answer.json()["taskId"]
    assert address == f"/api/knowledge/tasks/{task_id}"
    start("worker")
    shown = await_status(client, address, "DEAD", 2)
    assert (shown["nextRetryAt"], shown["errorCode"]) == (None, "handler_error")
    assert [status for _, status in _events(client, f"/api/tasks/{task_id}")] == [
        "QUEUED", "RUNNING", "RETRYING", "RUNNING", "DEAD",
    ]  # fmt: skip
    waiting = {"ingest": 0, "ingest:tasks:dlq": 1}
    await_so(lambda: leases() == 0 and broker.depths(waiting) == waiting, "one dead letter, and nothing pending")
    (suspended,) = operator.get(SUSPENDED).json()["tasks"]
    assert (suspended["taskId"], suspended["attemptCount"]) == (task_id, 2)
    assert "127.0.0.1:65530" in suspended["errorMessage"]


def _events(caller: Caller, address: str) -> list[tuple[int, str]]:
    answer = caller.get(f"{address}/events")
    events = [dict(line.split(": ", 1) for line in event.splitlines()) for event in answer.text.split("\n\n") if event]
    return [(int(event["id"]), json.loads(event["data"])["toStatus"]) for event in events]
