"""Operators hold queues over HTTP, and a queue that takes no new tasks answers 429 with Retry-After."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import settings
from models.engine import engine
from outbox.after_commit_publisher import after_commit_publisher
from receipts.save import save_any_shard
from tasks import broker
from tasks.core.limits import Limits, Rate
from tasks.execution.deliver import deliver
from tasks.operations.backlog import check_backlog
from tasks.operations.pauses import pause_queue
from tests.api.callers import FLAKY, Callers, expect_error
from tests.servers import wait_until
from tests.tasks.registrations import handler_of, registered
from tests.tasks.work import rows, wakeups

ONE_STAGE = {"stages": [{"name": "fetch", "kind": "http", "destination": "crm"}]}
pytestmark = pytest.mark.usefixtures("ledger")


def configure(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings.current.cache_clear()


def test_a_queue_is_paused_listed_and_resumed_over_http(callers: Callers) -> None:
    operator, user = callers("operate", name="ops"), callers("tasks:submit")
    paused = operator.post("/internal/queues/ingest/pause", json={"reason": "a move"}).json()
    assert (paused["queue"], paused["actor"], paused["reason"], paused["intake"]) == (
        "ingest",
        "api:ops",
        "a move",
        False,
    )
    assert user.submit({}).status_code == 202
    assert after_commit_publisher().wait_until_idle(20)
    found = operator.get("/internal/queues").json()
    (queue,) = found["queues"]
    assert (queue["due"], queue["messages"], queue["pause"]["actor"]) == (1, 0, "api:ops")
    assert (found["dlq"], found["dlqMessages"]) == ("ingest.dlq", 0)
    ended = operator.post("/internal/queues/ingest/resume").json()
    assert [each["reason"] for each in ended["ended"]] == ["a move"]
    wait_until(lambda: broker.depths(["ingest"]) == {"ingest": 1}, "the wake-up is in the broker")
    assert len(wakeups()) == 2


def test_pauses_and_scales_are_logged_with_the_name_of_the_operator(
    callers: Callers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    operator = callers("operate", name="ops")
    operator.post("/internal/queues/ingest/pause", json={"reason": "a move"})
    operator.post("/internal/queues/ingest/pause", json={"intake": True})
    operator.post("/internal/queues/ingest/resume", json={"intake": True})
    operator.post("/internal/queues/ingest/resume")
    operator.post("/internal/workers/scale", json={"processes": 4})
    records: list[Any] = [each for each in caplog.records if getattr(each, "event", "").startswith("queue_")]
    assert [(each.event, getattr(each, "intake", None)) for each in records] == [
        ("queue_paused", False), ("queue_paused", True), ("queue_resumed", True), ("queue_resumed", False),
        ("queue_scaled", None),
    ]  # fmt: skip
    assert {(each.queue, each.actor) for each in records} == {("ingest", "api:ops")}
    assert "a move" in records[0].getMessage()


def test_a_paused_intake_is_answered_429_with_retry_after(callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, OUTBOX_DESTINATIONS='{"crm": "https://127.0.0.1:1/crm?allow_private=1"}')
    operator, user = callers("operate", name="ops"), callers()
    operator.post("/internal/queues/ingest/pause", json={"intake": True, "reason": "a move"})
    refused = user.submit({})
    assert "ops has paused its intake: a move" in expect_error(refused, 429, "queue_paused")
    assert refused.headers["Retry-After"] == "30"
    saved = user.post("/api/tasks?receipt=saved", json={"type": FLAKY, "payload": {}})
    expect_error(saved, 429, "queue_paused")
    expect_error(user.post("/api/workflows/apply", json=ONE_STAGE), 429, "queue_paused")
    file = {"file": ("a.txt", b"some words")}
    expect_error(user.post("/api/knowledge/documents/upload-async", files=file), 429, "queue_paused")
    assert rows() == []
    operator.post("/internal/queues/ingest/resume", json={"intake": True})
    assert user.submit({}).status_code == 202


def test_what_was_accepted_is_saved_into_a_closed_queue_and_new_messages_are_refused_soon(
    callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, RECEIPT_TWO_PHASE_ENABLED="true")
    user = callers()

    def accept() -> Any:
        return user.post("/api/tasks?receipt=accepted", json={"type": FLAKY, "payload": {}})

    assert accept().status_code == 202
    file = {"file": ("a.txt", b"some words")}
    assert user.post("/api/knowledge/documents/upload-async?receipt=accepted", files=file).status_code == 202
    pause_queue(engine(), settings.current(), "ingest", actor="op@here", intake=True)
    wait_until(lambda: accept().status_code == 429, "the API knows the pause")
    expect_error(accept(), 429, "queue_paused")
    late = user.post("/api/knowledge/documents/upload-async?receipt=accepted", files=file)
    expect_error(late, 429, "queue_paused")
    assert save_any_shard(10, until_idle=True)
    statuses = [status for status, _ in rows()]
    assert len(statuses) >= 2
    assert set(statuses) == {"QUEUED"}


def test_invalid_requests_of_operators_are_refused(callers: Callers) -> None:
    operator = callers("operate")
    expect_error(operator.post("/internal/queues/nowhere/pause"), 404, "no_such_queue")
    expect_error(operator.post("/internal/queues/ingest/pause", json={"reasn": "x"}), 400, "misuse")
    expect_error(operator.post("/internal/queues/ingest/pause", json=[1]), 400, "misuse")
    expect_error(operator.post("/internal/workers/scale", json={"processes": 0}), 400, "misuse")
    expect_error(operator.post("/internal/workers/scale", json={"processes": 2, "queue": "no"}), 404, "no_such_queue")


def test_past_the_threshold_new_tasks_are_refused_until_the_backlog_is_small_again(
    callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, BACKLOG_ALERT_THRESHOLD="5", BACKLOG_POLICY="refuse")
    user = callers("tasks:submit")
    answers = [user.submit({}) for _ in range(6)]
    assert {answer.status_code for answer in answers} == {202}
    check_backlog(engine(), settings.current())
    refused = user.submit({})
    expect_error(refused, 429, "backlog_full")
    assert refused.headers["Retry-After"] == "30"
    deliver(engine(), [answer.json()["taskId"] for answer in answers])
    check_backlog(engine(), settings.current())
    assert user.submit({}).status_code == 202


def test_operators_list_handlers_with_their_limits(callers: Callers) -> None:
    registered(handler_of("remote.task", limits=Limits("remote.task", 5, Rate(100, "m"), "tenant")))
    shown = {each["type"]: each for each in callers("operate").get("/internal/handlers").json()["handlers"]}
    limits = [shown["remote.task"][name] for name in ("rate", "maxRunning", "limitBy", "workers")]
    assert limits == ["100/m", 5, "tenant", ["another:1-worker"]]
