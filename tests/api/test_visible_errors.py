"""Details of errors (tracebacks, paths, SQL, addresses) reach only clients with the scope `operate`."""

from __future__ import annotations

import json
from typing import Any

import pytest

import settings
from api.documents import UPLOAD
from api.tokens import Scope
from api.visible_errors import REASONS, SENTENCES, TIMES_ONLY
from models.engine import engine
from models.errors import Unreachable
from tasks import Permanent, handler
from tasks.core.outcomes import ErrorCode
from tasks.execution.deliver import deliver
from tasks.operations.pauses import pause_queue
from tasks.operations.why_waiting import QueueState, ReasonCode
from tests.api.callers import Caller, Callers
from workflows import StageInput, stage

SECRET = "hunter2"
NOT_FOR_CLIENTS = (SECRET, "Traceback", ".py", "SELECT", "127.0.0.1", "Error:", "Permanent")
EVERYTHING_ELSE = tuple(scope for scope in Scope if scope != Scope.OPERATE)


@handler("test.leaky", max_attempts=1)
def leaky(task: Any, db: Any) -> None:
    db.connection().exec_driver_sql(f"SELECT FROM public.{SECRET}")


@stage("test.refuses")
def refuses(given: StageInput) -> None:
    raise Permanent(f"{SECRET} is at 127.0.0.1:5432")


@pytest.fixture
def client_(callers: Callers) -> Caller:
    return callers(*EVERYTHING_ELSE, name="ci")


@pytest.fixture
def operator(callers: Callers) -> Caller:
    return callers(Scope.OPERATE, Scope.TASKS_READ_ALL, Scope.DOCUMENTS_READ)


def fail(caller: Caller, type_: str, payload: Any = None) -> str:
    answer = caller.post("/api/tasks", json={"type": type_, "payload": payload, "retry": {"max": 1}})
    deliver(engine(), [answer.json()["taskId"]])
    path: str = answer.headers["location"]
    return path


def assert_nothing_leaks(shown: Any) -> None:
    text = json.dumps({name: value for name, value in shown.items() if name not in ("payload", "type")})
    assert [part for part in NOT_FOR_CLIENTS if part in text] == []


@pytest.mark.parametrize("path", ["", "/transitions"])
def test_sql_and_traceback_of_a_failed_task_are_for_operators_only(
    client_: Caller, operator: Caller, path: str
) -> None:
    address = fail(client_, "test.leaky") + path
    assert_nothing_leaks(client_.get(address).json())
    assert SECRET in operator.get(address).text


def test_a_client_reads_the_code_and_a_neutral_sentence(client_: Caller, operator: Caller) -> None:
    address = fail(client_, "test.leaky")
    shown, seen = client_.get(address).json(), operator.get(address).json()
    assert (shown["status"], shown["errorCode"], shown["errorMessage"], shown["lastError"]) == (
        "DEAD", "handler_error", "The handler failed.", None,
    )  # fmt: skip
    assert "Traceback" in seen["lastError"]
    assert seen["errorMessage"].startswith("ProgrammingError: ")
    history = client_.get(f"{address}/transitions").json()["transitions"]
    assert [(each["toStatus"], each["message"], each["actor"]) for each in history] == [
        (status, None, None) for status in ("QUEUED", "RUNNING", "DEAD")
    ]


def test_the_address_of_a_destination_is_for_operators_only(
    client_: Caller, operator: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    crm = "http://127.0.0.1:1/x?allow_private=1&allow_http=1"
    monkeypatch.setenv("OUTBOX_DESTINATIONS", json.dumps({"crm": crm}))
    monkeypatch.setenv("CHROMA_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("INGEST_MAX_ATTEMPTS", "1")
    settings.current.cache_clear()
    flow = {"stages": [{"name": "ask", "kind": "http", "destination": "crm"}]}
    upload = client_.post(UPLOAD, files={"file": ("a.txt", b"text", "text/plain")})
    deliver(engine(), [upload.json()["taskId"]])
    for address in (fail(client_, "workflow.execute", flow), upload.headers["location"]):
        assert_nothing_leaks(client_.get(address).json())
        assert "127.0.0.1:1" in operator.get(address).json()["errorMessage"]


def test_a_waiting_request_gets_no_details_either(client_: Caller) -> None:
    flow = {"stages": [{"name": "refuse", "kind": "python", "function": "test.refuses"}]}
    answer = client_.post("/api/workflows/apply", json=flow, key="k")
    deliver(engine(), [answer.json()["taskId"]])
    final = client_.post("/api/workflows/apply?wait=5", json=flow, key="k").json()
    assert (final["status"], final["errorCode"], final["errorMessage"]) == (
        "DEAD", "permanent", SENTENCES[ErrorCode.PERMANENT],
    )  # fmt: skip
    assert_nothing_leaks(final)


def test_a_task_that_did_not_fail_has_no_sentence(client_: Caller) -> None:
    shown = client_.get(fail(client_, "demo.flaky")).json()
    assert (shown["status"], shown["errorMessage"]) == ("SUCCEEDED", None)


def test_why_a_task_waits_names_workers_operators_and_addresses_to_operators_only(
    client_: Caller, operator: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause_queue(engine(), settings.current(), "ingest", actor=f"op@{SECRET}", reason=f"{SECRET} is at 127.0.0.1:5432")

    def unreachable(_queue: str) -> QueueState:
        raise Unreachable(f"redis://{SECRET}@127.0.0.1:6379 does not answer.")

    monkeypatch.setattr("tasks.operations.why_waiting.broker.depths", unreachable)
    path = client_.post("/api/tasks", json={"type": "test.leaky"}).headers["location"] + "/why"
    shown, full = client_.get(path).json(), operator.get(path).json()
    assert_nothing_leaks(shown)
    assert [each["code"] for each in shown["why"]] == [each["code"] for each in full["why"]]
    assert {each["code"] for each in shown["why"]} >= {"queue_paused", "broker_unreachable"}
    assert SECRET in json.dumps(full)


def test_every_reason_has_a_neutral_sentence() -> None:
    assert {*REASONS, *TIMES_ONLY} == set(ReasonCode)
