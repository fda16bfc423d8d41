"""Submit and wait over HTTP: the final task if it ends in time, otherwise what was submitted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import settings
from api.tokens import Scope
from models.engine import engine
from tasks.execution.deliver import deliver
from tasks.recovery.prune import prune
from tests.api.callers import FLAKY, Caller, Callers, expect_error
from tests.servers import wait_until
from tests.tasks.command_line import DIES, change
from tests.tasks.deliveries import statements
from tests.tasks.work import rows
from tests.workflows.flows import STORE, create_tables, flow

TASKS, APPLY = "/api/tasks", "/api/workflows/apply"


@pytest.fixture
def caller(callers: Callers) -> Caller:
    return callers(Scope.TASKS_SUBMIT, Scope.WORKFLOWS_SUBMIT, name="ci")


@contextmanager
def a_worker() -> Iterator[None]:
    """Run the first task that is in the ledger, in a thread."""

    def run() -> None:
        wait_until(rows, "the task is in the ledger")
        deliver(engine(), [id_ for (id_,) in rows("id")])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def submit(caller: Caller, payload: Any = None, *, path: str = TASKS, prefer: str | None = None) -> Any:
    headers = {"Prefer": prefer} if prefer else {}
    return caller.post(path, json={"type": FLAKY, "payload": payload}, headers=headers, key="k")


def test_a_waiting_submit_is_answered_with_the_final_task(caller: Caller) -> None:
    with a_worker():
        answer = submit(caller, {"n": 1}, path=f"{TASKS}?wait=30")
    assert (answer.status_code, answer.json()["status"], answer.json()["payload"]) == (200, "SUCCEEDED", {"n": 1})
    assert answer.headers["location"] == f"/api/tasks/{answer.json()['taskId']}"
    assert "preference-applied" not in answer.headers


def test_a_preferred_wait_is_applied_and_says_so(caller: Caller) -> None:
    with a_worker():
        answer = submit(caller, DIES, prefer="respond-async, wait=10")
    assert (answer.status_code, answer.json()["status"]) == (200, "DEAD")
    assert answer.json()["errorMessage"] == "The task can never succeed.", "details are for operators"
    assert answer.headers["preference-applied"] == "wait=10"
    again = submit(caller, DIES, prefer="wait=99999")
    assert (again.status_code, again.headers["preference-applied"]) == (200, "wait=60")


def test_a_task_that_does_not_end_in_time_is_answered_202(caller: Caller) -> None:
    answer = submit(caller, path=f"{TASKS}?wait=0.05")
    assert (answer.status_code, answer.json()["status"]) == (202, "QUEUED")
    asked = submit(caller, prefer="wait=0")
    assert (asked.status_code, asked.headers["preference-applied"]) == (200, "wait=0")
    for wait in ("61", "-1", "soon", "nan"):
        expect_error(submit(caller, path=f"{TASKS}?wait={wait}"), 400, "misuse")


def test_the_parameter_wins_over_the_header_and_a_receipt_does_not_wait(caller: Caller) -> None:
    assert submit(caller, path=f"{TASKS}?wait=0", prefer="wait=60").status_code == 202
    expect_error(submit(caller, path=f"{TASKS}?wait=5&receipt=saved"), 400, "misuse")
    assert submit(caller, path=f"{TASKS}?receipt=saved", prefer="wait=60").json()["level"] == "saved"


def test_a_task_that_was_requeued_is_waited_for_until_it_ends_again(caller: Caller) -> None:
    """Its history has a final status in the middle."""
    id_ = submit(caller, DIES).json()["taskId"]
    deliver(engine(), [id_])
    assert caller.post(f"{TASKS}/{id_}/retry").status_code == 200
    assert submit(caller, DIES, path=f"{TASKS}?wait=0.05").json()["created"] is False
    change([id_], "payload = '{}'")
    with a_worker():
        final = caller.post(f"{TASKS}?wait=30", json={"type": FLAKY, "payload": {}}, key="k")
    assert final.json()["status"] == "SUCCEEDED"


def test_a_key_whose_task_was_pruned_does_not_wait(caller: Caller) -> None:
    id_ = submit(caller).json()["taskId"]
    deliver(engine(), [id_])
    change([id_], "finished_at = finished_at - interval '1000 days'")
    prune(engine(), settings.current())
    assert rows() == []
    answer = submit(caller, path=f"{TASKS}?wait=60")
    assert answer.json() == {"taskId": id_, "status": "SUCCEEDED", "created": False}


def test_a_submit_that_does_not_wait_sends_no_further_statement(caller: Caller) -> None:
    submit(caller)
    with statements() as sent:
        assert submit(caller).status_code == 200
    assert not [each for each in sent if "ingest_task_transition AS told" in each]


def test_a_workflow_takes_notify_context_and_priority_beside_its_stages(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables()
    monkeypatch.setenv("OUTBOX_DESTINATIONS", '{"crm": "http://127.0.0.1:1/x?allow_private=1&allow_http=1"}')
    settings.current.cache_clear()
    body = flow(STORE, input=17)
    more = {"notify": "crm", "priority": 9, "context": {"traceId": "t", "idempotencyKey": "k"}}
    with a_worker():
        answer = caller.post(f"{APPLY}?wait=30", json={**body, **more})
    task = answer.json()
    assert (answer.status_code, task["status"], task["payload"]) == (200, "SUCCEEDED", body)
    assert (task["notify"], task["priority"], task["idempotencyKey"]) == ("crm", 9, "ci:k")
    assert task["context"] == {"traceId": "t", "principal": "ci", "idempotencyKey": "ci:k"}
    for field, code in (
        ({"priority": 10}, "bad_task"),
        ({"notify": "x"}, "unknown_destination"),
        ({"queue": "x"}, "bad_workflow"),
    ):
        expect_error(caller.post(APPLY, json={**body, **field}), 400, code)
    expect_error(caller.post(APPLY, json={**body, "context": [1]}), 400, "bad_task")
    expect_error(caller.post(APPLY, content=b"[1]"), 400, "bad_workflow")
