"""Workflows over HTTP: submitted like any task; a waiting request holds no thread and no connection."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx2
import pytest

from api import ledger_calls
from api.app import app
from api.tokens import Scope
from models.engine import engine
from tasks import Permanent
from tasks.core.task_ids import keyed_id
from tasks.execution.deliver import deliver
from tests.api.callers import Caller, Callers, expect_error
from tests.servers import wait_until
from tests.tasks import work
from workflows import StageInput, stage

APPLY = "/api/workflows/apply"


@stage("test.greet")
def greet(given: StageInput) -> Any:
    if given.input == "":
        raise Permanent("no name was given")
    return f"Hello {given.input}"


def workflow(input_: Any = "Ada") -> dict[str, Any]:
    return {"input": input_, "stages": [{"name": "greet", "kind": "python", "function": "test.greet"}]}


@pytest.fixture
def caller(callers: Callers) -> Caller:
    return callers(Scope.WORKFLOWS_SUBMIT, Scope.TASKS_READ, Scope.OPERATE, name="ci")


def test_the_body_is_the_payload_and_the_key_belongs_to_the_principal(caller: Caller) -> None:
    body = workflow()
    first, again = caller.post(APPLY, json=body, key="k"), caller.post(APPLY, json=body, key="k")
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json()["taskId"] == again.json()["taskId"] == str(keyed_id("workflow.execute", "ci:k"))
    assert caller.get(first.headers["location"]).json()["payload"] == body
    expect_error(caller.post(APPLY, json=workflow("Bob"), key="k"), 409, "idempotency_conflict")
    expect_error(caller.post(APPLY, content=b"{"), 400, "bad_json")


def test_a_workflow_that_cannot_run_is_rejected_before_it_is_stored(caller: Caller) -> None:
    for bad, sentence in [
        ({}, "The workflow is invalid: `stages` is required."),
        (
            {"stages": [{"name": "a", "kind": "python", "function": "os.system"}]},
            "No stage function is named 'os.system'",
        ),
        ({"stages": [{"name": "a", "kind": "http", "destination": "nowhere"}]}, "There is no destination 'nowhere'"),
        ({"stages": [{"name": "a", "kind": "llm", "model": "m", "prompt": "x"}]}, "set LLM_BASE_URL"),
    ]:
        assert sentence in expect_error(caller.post(APPLY, json=bad), 400, "bad_workflow")
    assert work.rows() == []


def test_the_route_for_tasks_rejects_it_too(callers: Callers) -> None:
    envelope = {"type": "workflow.execute", "payload": {"stages": []}}
    caller = callers(Scope.TASKS_SUBMIT, Scope.WORKFLOWS_SUBMIT)
    expect_error(caller.post("/api/tasks", json=envelope), 400, "bad_workflow")


def test_a_waiting_request_gets_the_result(caller: Caller) -> None:
    with worker_of("ci:k"):
        answer = caller.post(f"{APPLY}?wait=30", json=workflow(), key="k")
    assert answer.status_code == 200
    assert (answer.json()["status"], answer.json()["result"]["output"]) == ("SUCCEEDED", "Hello Ada")


def test_a_waiting_request_gets_the_error_of_a_dead_workflow(caller: Caller) -> None:
    with worker_of("ci:k"):
        answer = caller.post(f"{APPLY}?wait=30", json=workflow(""), key="k")
    assert answer.status_code == 200
    assert (answer.json()["status"], answer.json()["errorMessage"]) == ("DEAD", "Permanent: no name was given")


def test_a_waiting_request_gets_a_receipt_when_time_is_up(caller: Caller) -> None:
    started_at = time.monotonic()
    answer = caller.post(f"{APPLY}?wait=0.2", json=workflow())
    assert 0.2 <= time.monotonic() - started_at < 5
    assert (answer.status_code, answer.json()["status"], answer.json()["created"]) == (202, "QUEUED", True)
    assert caller.get(answer.headers["location"]).json()["status"] == "QUEUED"


def test_an_invalid_wait_is_rejected(caller: Caller) -> None:
    for wait in ("61", "-1", "soon", "nan", "inf"):
        assert expect_error(caller.post(f"{APPLY}?wait={wait}", json=workflow()), 400, "misuse").startswith("`wait`: ")
    assert work.rows() == []


def test_waiting_requests_hold_neither_a_thread_nor_a_connection(caller: Caller) -> None:
    """More requests wait at once than there are threads and connections, and others are still served."""
    asyncio.run(_many_wait(caller))


async def _many_wait(caller: Caller) -> None:
    headers = {"Authorization": f"Bearer {caller.token}"}
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://api", headers=headers, timeout=60) as client:
        waiting = [
            asyncio.create_task(client.post(f"{APPLY}?wait=60", json=workflow(number)))
            for number in range(3 * ledger_calls.THREADS)
        ]
        while len(ids := await asyncio.to_thread(work.rows, "id")) < len(waiting):
            await asyncio.sleep(0.02)
        async with asyncio.timeout(20):
            while engine().pool.checkedout():  # type: ignore[attr-defined]
                await asyncio.sleep(0.001)  # a waiting request that kept its connection would never let this end
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get(f"/api/tasks/{ids[0][0]}")).json()["status"] == "QUEUED"
        for (id_,) in ids:
            await asyncio.to_thread(deliver, engine(), [id_])
        answers = await asyncio.gather(*waiting)
    assert {(answer.status_code, answer.json()["status"]) for answer in answers} == {(200, "SUCCEEDED")}


class worker_of:
    """Runs one task in a thread as soon as it is in the ledger."""

    def __init__(self, key: str) -> None:
        self.id = keyed_id("workflow.execute", key)
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: Any) -> None:
        self.thread.join()

    def _run(self) -> None:
        wait_until(lambda: work.rows("id", "id = :id", id=self.id), "the task is in the ledger")
        deliver(engine(), [self.id])
