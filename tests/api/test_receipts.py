"""Receipts over HTTP: accepted at once, saved later, and never a false 404."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

import settings
from receipts.save import save_any_shard
from tests.api.callers import FLAKY, Callers
from tests.servers import ServersOfTests
from tests.tasks.deliveries import scalar


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
