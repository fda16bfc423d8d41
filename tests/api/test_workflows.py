"""Applying a workflow: submitted like any task, and waited for without holding anything."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import anyio.to_thread
import httpx2
import pytest

from api import workflows
from api.app import app
from models.engine import engine
from tasks.identity import keyed_id
from tasks.ingest import ingest
from tasks.tokens import Scope
from tests.api.callers import FLAKY, Caller, Callers, refused
from tests.servers import wait_until
from tests.tasks import work

APPLY = "/api/workflows/apply"


@pytest.fixture(autouse=True)
def _a_handler_that_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a workflow does is not the door's business."""
    monkeypatch.setattr(workflows, "TYPE", FLAKY)


@pytest.fixture
def caller(callers: Callers) -> Caller:
    return callers(Scope.WORKFLOWS_SUBMIT, Scope.TASKS_READ, name="ci")


def test_the_type_is_that_of_workflows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert workflows.TYPE == "workflow.execute"


def test_the_body_is_the_payload_and_the_key_is_the_principals(caller: Caller) -> None:
    body = {"stages": [{"name": "a"}]}
    first, again = caller.post(APPLY, json=body, key="k"), caller.post(APPLY, json=body, key="k")
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json()["taskId"] == again.json()["taskId"] == str(keyed_id(FLAKY, "ci:k"))
    assert caller.get(first.headers["location"]).json()["payload"] == body
    refused(caller.post(APPLY, json={}, key="k"), 409, "idempotency_conflict")
    refused(caller.post(APPLY, content=b"{"), 400, "bad_json")


def test_whoever_waits_gets_the_result(caller: Caller) -> None:
    with worker_of("ci:k"):
        answer = caller.post(f"{APPLY}?wait=30", json={}, key="k")
    assert answer.status_code == 200
    assert (answer.json()["status"], answer.json()["result"]) == ("SUCCEEDED", {"attempts": 1})


def test_whoever_waits_for_one_that_dies_gets_the_error(caller: Caller) -> None:
    with worker_of("ci:k"):
        answer = caller.post(f"{APPLY}?wait=30", json={"permanent": "no such model"}, key="k")
    assert answer.status_code == 200
    assert (answer.json()["status"], answer.json()["errorMessage"]) == ("DEAD", "Permanent: no such model")


def test_whoever_waits_in_vain_gets_the_task(caller: Caller) -> None:
    started_at = time.monotonic()
    answer = caller.post(f"{APPLY}?wait=0.2", json={})
    assert 0.2 <= time.monotonic() - started_at < 5
    assert (answer.status_code, answer.json()["status"], answer.json()["created"]) == (202, "QUEUED", True)
    assert caller.get(answer.headers["location"]).json()["status"] == "QUEUED"


def test_nobody_waits_for_ever(caller: Caller) -> None:
    for wait in ("61", "-1", "soon", "nan", "inf"):
        assert refused(caller.post(f"{APPLY}?wait={wait}", json={}), 400, "misuse").startswith("wait: ")
    assert work.rows() == []


def test_many_who_wait_hold_neither_a_thread_nor_a_connection(caller: Caller) -> None:
    """More than there are threads and connections wait at once, and others are still served."""
    asyncio.run(_many_wait(caller))


async def _many_wait(caller: Caller) -> None:
    headers = {"Authorization": f"Bearer {caller.token}"}
    threads = int(anyio.to_thread.current_default_thread_limiter().total_tokens)
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://api", headers=headers, timeout=60) as client:
        waiting = [
            asyncio.create_task(client.post(f"{APPLY}?wait=60", json={"n": number})) for number in range(threads + 10)
        ]
        while len(ids := await asyncio.to_thread(work.rows, "id")) < len(waiting):
            await asyncio.sleep(0.02)
        async with asyncio.timeout(20):
            while engine().pool.checkedout():  # type: ignore[attr-defined]
                await asyncio.sleep(0.001)  # until nobody looks just now: whoever held on to one would hold it still
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get(f"/api/tasks/{ids[0][0]}")).json()["status"] == "QUEUED"
        await asyncio.to_thread(ingest, engine(), [id_ for (id_,) in ids])
        answers = await asyncio.gather(*waiting)
    assert {(answer.status_code, answer.json()["status"]) for answer in answers} == {(200, "SUCCEEDED")}


class worker_of:
    """A worker's run of one task, as soon as it is there."""

    def __init__(self, key: str) -> None:
        self.id = keyed_id(FLAKY, key)
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: Any) -> None:
        self.thread.join()

    def _run(self) -> None:
        wait_until(lambda: work.rows("id", "id = :id", id=self.id), "the task is there")
        ingest(engine(), [self.id])
