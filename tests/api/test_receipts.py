"""Receipts over HTTP: accepted at once, saved later, and never a false 404."""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from typing import Any

import pytest

import settings
from api import token_cache, tokens
from models.engine import engine
from receipts.save import save_any_shard
from tests.api.callers import FLAKY, Callers
from tests.servers import ServersOfTests
from tests.tasks.deliveries import scalar
from tests.workflows.flows import STORE, flow


@pytest.fixture(autouse=True)
def _two_phase(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "true")
    settings.current.cache_clear()


def accept(caller: Any, payload: Any, *, key: str | None = None) -> Any:
    return caller.post("/api/tasks?receipt=accepted", json={"type": FLAKY, "payload": payload}, key=key)


def test_a_task_is_accepted_then_saved_and_both_are_signed(callers: Callers) -> None:
    caller = callers()
    answer = accept(caller, {"n": 1}, key="one")
    assert answer.status_code == 202
    receipt = answer.json()
    assert (receipt["level"], receipt["duplicate"], receipt["policy"]) == ("accepted", False, "aof-always")
    assert receipt["clientId"] == "one"
    assert {"signature", "keyId", "promisedBy", "acceptedAt", "sha256"} <= receipt.keys()
    shown = caller.get(f"/api/tasks/{receipt['taskId']}").json()
    assert (shown["status"], shown["level"]) == ("QUEUED", "accepted")
    assert caller.get(answer.headers["Location"] + "?level=saved").status_code == 202
    assert save_any_shard(10, until_idle=True)
    saved = caller.get(answer.headers["Location"] + "?level=saved")
    assert (saved.status_code, saved.json()["level"]) == (200, "saved")
    assert saved.json()["ledgerSeq"] == scalar("SELECT seq FROM ledger.receipt")
    assert caller.get(f"/api/tasks/{receipt['taskId']}").json()["type"] == FLAKY
    again = accept(caller, {"n": 1}, key="one")
    assert (again.status_code, again.json()["duplicate"], again.json()["level"]) == (200, True, "saved")


def test_the_same_key_with_another_payload_is_a_conflict_before_and_after_it_is_saved(callers: Callers) -> None:
    caller = callers()
    receipt = accept(caller, {"n": 1}, key="one").json()
    for _ in range(2):
        refused = accept(caller, {"n": 2}, key="one")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_conflict")
        assert refused.json()["error"]["taskId"] == receipt["taskId"]
        save_any_shard(10, until_idle=True)


def test_an_id_that_was_never_accepted_is_unknown_and_that_of_another_principal_too(callers: Callers) -> None:
    caller, other = callers(), callers("tasks:read")
    receipt = accept(caller, 1).json()
    for path in (f"/api/receipts/{receipt['id']}", f"/api/tasks/{receipt['id']}", f"/api/receipts/{uuid.uuid4()}"):
        assert other.get(path).status_code == 404


def test_a_workflow_is_accepted_and_one_that_cannot_run_is_not(callers: Callers) -> None:
    caller = callers()
    path = "/api/workflows/apply?receipt=accepted"
    refused = caller.post(path, json={"stages": "none"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_workflow")
    assert scalar("SELECT count(*) FROM ledger.receipt") == 0
    workflow = flow(STORE)
    receipt = caller.post(path, json=workflow).json()
    assert receipt["level"] == "accepted", receipt
    assert save_any_shard(10, until_idle=True)
    assert caller.get(f"/api/tasks/{receipt['taskId']}").json()["type"] == "workflow.execute"
    both = caller.post(f"{path}&wait=5", json=workflow)
    assert (both.status_code, both.json()["error"]["code"]) == (400, "misuse")


def test_an_upload_is_accepted_and_its_task_is_found_by_the_id_of_the_receipt(callers: Callers) -> None:
    caller = callers()
    content = bytes(range(256)) * 8  # not UTF-8
    file = {"file": ("notes.txt", content, "text/plain")}
    answer = caller.post("/api/knowledge/documents/upload-async?receipt=accepted", files=file)
    receipt = answer.json()
    assert (answer.status_code, receipt["level"], receipt["taskId"]) == (202, "accepted", None)
    assert receipt["sha256"] == hashlib.sha256(content).hexdigest()
    waiting = caller.get(f"/api/knowledge/tasks/{receipt['id']}").json()
    assert (waiting["status"], waiting["level"]) == ("QUEUED", "accepted")
    assert save_any_shard(10, until_idle=True)
    assert bytes(scalar("SELECT content FROM ledger.document")) == content
    saved = caller.get(f"/api/receipts/{receipt['id']}").json()
    task_id = str(scalar("SELECT id FROM ledger.ingest_task"))
    assert saved["taskId"] == task_id != receipt["id"]
    assert caller.get(f"/api/knowledge/tasks/{receipt['id']}").json()["taskId"] == task_id


def test_what_is_too_large_for_the_receipt_log_is_refused_before_it_is_parsed(
    callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECEIPT_MAX_BYTES", "1000")
    settings.current.cache_clear()
    caller = callers()
    for answer in (
        caller.post("/api/tasks?receipt=accepted", content=b"[" * 1001),
        accept(caller, "x" * 990),
        caller.post("/api/knowledge/documents/upload-async?receipt=accepted", files={"file": ("a.txt", b"x" * 1001)}),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "envelope_too_large")
    assert accept(caller, "x" * 100).status_code == 202


def test_a_request_waits_until_its_message_is_saved(callers: Callers) -> None:
    caller = callers()
    location = accept(caller, 1).headers["Location"]
    saver = threading.Timer(0.3, lambda: save_any_shard(10, until_idle=True))
    saver.start()
    answer = caller.get(f"{location}?level=saved", headers={"Prefer": "respond-async, wait=20"})
    saver.join()
    assert (answer.status_code, answer.json()["level"]) == (200, "saved")
    assert answer.headers["Preference-Applied"] == "wait=20"


def test_a_receipt_can_be_followed_as_events(callers: Callers) -> None:
    caller = callers()
    location = accept(caller, 1).headers["Location"]
    saver = threading.Timer(0.3, lambda: save_any_shard(10, until_idle=True))
    saver.start()
    answer = caller.get(location, headers={"Accept": "text/event-stream"})
    saver.join()
    events = [dict(line.split(": ", 1) for line in event.splitlines()) for event in answer.text.split("\n\n") if event]
    assert [event["event"] for event in events] == ["accepted", "saved"]
    assert json.loads(events[1]["data"])["ledgerSeq"] == scalar("SELECT seq FROM ledger.receipt")


def test_receipt_saved_answers_from_the_ledger_at_once(callers: Callers) -> None:
    caller = callers()
    body = {"type": FLAKY, "payload": {"n": 1}}
    first = caller.post("/api/tasks?receipt=saved", json=body, key="one")
    again = caller.post("/api/tasks?receipt=saved", json=body, key="one")
    assert (first.status_code, first.json()["level"], first.json()["policy"]) == (202, "saved", "postgresql-commit")
    assert (again.status_code, again.json()["duplicate"]) == (200, True)
    assert again.json()["ledgerSeq"] == first.json()["ledgerSeq"]
    refused = caller.post("/api/tasks?receipt=saved", json={**body, "payload": 2}, key="one")
    assert refused.status_code == 409
    assert caller.post("/api/tasks?receipt=delivered", json=body).status_code == 400


def test_two_phase_switched_off_saves_at_once(callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "false")
    settings.current.cache_clear()
    answer = accept(callers(), 1)
    assert (answer.status_code, answer.json()["level"], answer.json()["ordered"]) == (202, "saved", True)


def test_the_types_of_a_token_and_keys_of_other_principals_hold_for_accepted_tasks(callers: Callers) -> None:
    limited = callers("tasks:submit", types=["invoice.*"])
    assert accept(limited, 1).status_code == 403
    one, other = callers(), callers()
    assert accept(one, 1, key="same").json()["id"] != accept(other, 2, key="same").json()["id"]


def test_a_revoked_token_is_refused_within_seconds(callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = callers()
    assert accept(caller, 1).status_code == 202
    with engine().begin() as connection:
        tokens.revoke(connection, caller.name)
    assert accept(caller, 2).status_code == 202, "it was checked a moment ago"
    monkeypatch.setattr(token_cache, "FRESH_SECONDS", 0.0)
    assert accept(caller, 3).status_code == 401
    assert caller.get(f"/api/receipts/{uuid.uuid4()}").status_code == 401
