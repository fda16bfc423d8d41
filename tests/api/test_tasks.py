"""Tasks over HTTP: a submitted task is in the ledger once, and only its principal may see it."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session
from starlette.requests import Request

from api import principals
from api.submission import read_idempotency_key
from api.tokens import Scope
from models.engine import engine, sessions
from models.errors import Misuse
from outbox.canonical_json import MAX_BYTES, MAX_KEYS
from tasks import submit
from tasks.core.task_ids import keyed_id
from tasks.execution.deliver import deliver
from tests.api.callers import FLAKY, Callers, expect_error
from tests.servers import ServersOfTests, wait_until
from tests.tasks import work
from tests.tasks.deliveries import scalar

MANY_KEYS = json.dumps({str(number): number for number in range(MAX_KEYS + 1)}).encode()
INVALID = [  # body, status, code
    (b"", 400, "bad_json"),
    (b"{", 400, "bad_json"),
    (b"[" * 100_000 + b"]" * 100_000, 400, "payload_too_deep"),
    (b'{"type": "demo.flaky", "context": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "payload_too_deep"),
    (b'{"type": "demo.flaky", "payload": "\xff"}', 400, "bad_json"),
    (b'{"type": "demo.flaky", "payload": ' + b"9" * 5000 + b"}", 400, "payload_number_too_long"),
    (b"[]", 400, "bad_task"),
    (b"null", 400, "bad_task"),
    (b"{}", 400, "bad_task"),
    (b'{"type": 1}', 400, "bad_task"),
    (b'{"type": "demo.flaky", "context": []}', 400, "bad_task"),
    (b'{"type": "demo.flaky", "retry": {"max": 0}}', 400, "bad_task"),
    (b'{"type": "demo.flaky", "retry": {"nextAttemptAt": NaN}}', 400, "bad_task"),
    (b'{"type": "demo.flaky", "paylod": {}}', 400, "unknown_field"),
    (b'{"type": "demo.flaky", "retry": {"maximum": 3}}', 400, "unknown_field"),
    (b'{"type": "demo.flaky", "maxAttempts": 3}', 400, "bad_task"),
    (b'{"type": "demo.flaky", "context": {"idempotencyKey": ""}}', 400, "bad_task"),
    (b'{"type": "demo.flaky", "priority": 10}', 400, "bad_task"),
    (b'{"type": "demo.flaky", "queue": "elsewhere"}', 400, "unknown_queue"),
    (b'{"type": "demo.flaky", "notify": "nowhere"}', 400, "unknown_destination"),
    (b'{"type": "unknown.type"}', 400, "unknown_type"),
    (b'{"type": "demo\\u0000flaky"}', 400, "unknown_type"),
    (b'{"type": "demo.flaky", "payload": NaN}', 400, "payload_not_json"),
    (b'{"type": "demo.flaky", "payload": "\\ud800"}', 400, "payload_not_json"),
    (b'{"type": "demo.flaky", "payload": "\\u0000"}', 400, "payload_has_nul"),
    (b'{"type": "demo.flaky", "payload": {"\\u0000": 1}}', 400, "payload_has_nul"),
    (b'{"type": "demo.flaky", "context": {"user": "\\u0000"}}', 400, "payload_has_nul"),
    (b'{"type": "demo.flaky", "context": {"idempotencyKey": "\\u0000"}}', 400, "bad_task"),
    (b'{"type": "demo.flaky", "payload": ' + b"[" * 65 + b"]" * 65 + b"}", 400, "payload_too_deep"),
    (b'{"type": "demo.flaky", "payload": "' + b"x" * MAX_BYTES + b'"}', 413, "payload_too_large"),
    (b'{"type": "demo.flaky", "payload": ' + MANY_KEYS + b"}", 400, "payload_too_many_keys"),
]


def test_a_submitted_task_is_in_the_ledger_and_runs(callers: Callers) -> None:
    caller = callers()
    answer = caller.submit({"fail": 1}, context={"traceId": "t"}, priority=9, retry={"max": 3})
    assert answer.status_code == 202
    made = answer.json()
    assert made == {"taskId": made["taskId"], "status": "QUEUED", "created": True}
    assert answer.headers["location"] == f"/api/tasks/{made['taskId']}"
    task = caller.get(answer.headers["location"]).json()
    assert (task["type"], task["payload"], task["status"], task["priority"]) == (FLAKY, {"fail": 1}, "QUEUED", 9)
    assert task["retry"] == {"count": 0, "max": 3, "nextAttemptAt": None}
    assert task["context"] == {"traceId": "t", "principal": caller.name}
    deliver(engine(), [made["taskId"]])
    task = caller.get(answer.headers["location"]).json()
    assert (task["status"], task["attemptCount"], task["errorCode"]) == ("RETRYING", 1, "handler_error")
    assert task["retry"]["count"] == 1
    assert task["retry"]["nextAttemptAt"] == task["nextRetryAt"] != None  # noqa: E711
    history = caller.get(f"{answer.headers['location']}/transitions").json()
    assert [(each["fromStatus"], each["toStatus"]) for each in history["transitions"]] == [
        (None, "QUEUED"),
        ("QUEUED", "RUNNING"),
        ("RUNNING", "RETRYING"),
    ]
    assert "failure 1 of 1" in history["transitions"][2]["message"]


def test_a_lease_is_never_shown(callers: Callers) -> None:
    caller = callers()
    id_ = caller.submit().json()["taskId"]
    token = uuid.uuid4()
    with engine().begin() as connection:
        connection.exec_driver_sql(
            "UPDATE celeriac.ingest_task SET status = 'RUNNING', lease_token = %s", (str(token),)
        )
    shown = caller.get(f"/api/tasks/{id_}")
    assert shown.json()["status"] == "RUNNING"
    assert str(token) not in shown.text
    assert "leaseToken" not in shown.json()


def test_a_scheduled_task_is_not_due_before_its_time(callers: Callers) -> None:
    caller, at = callers(), datetime(2100, 1, 1, tzinfo=UTC)
    for fields in ({"runAt": at.isoformat()}, {"retry": {"nextAttemptAt": at.isoformat()}}):
        id_ = caller.submit(**fields).json()["taskId"]
        assert datetime.fromisoformat(caller.get(f"/api/tasks/{id_}").json()["nextRetryAt"]) == at
    assert "time zone" in expect_error(caller.submit(runAt="2100-01-01T00:00"), 400, "bad_task")


def test_times_are_utc_in_any_time_zone_of_the_session(callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = callers()
    address = caller.submit(runAt="2100-01-01T08:00:00+08:00").headers["location"]
    monkeypatch.setenv("PGTZ", "Asia/Shanghai")
    engine().dispose()
    task = caller.get(address).json()
    assert task["nextRetryAt"] == task["retry"]["nextAttemptAt"] == "2100-01-01T00:00:00+00:00"


def test_a_shown_task_can_be_submitted_again_unchanged(callers: Callers) -> None:
    caller = callers()
    shown = caller.get(caller.submit({"n": 1}, priority=7).headers["location"]).json()
    again = caller.get(caller.post("/api/tasks", json=shown).headers["location"]).json()
    assert again["taskId"] != shown["taskId"]
    same = ("type", "payload", "queue", "priority", "maxAttempts", "context")
    assert {name: again[name] for name in same} == {name: shown[name] for name in same}


# idempotency keys


def test_the_same_key_and_payload_is_the_same_task(callers: Callers) -> None:
    caller = callers()
    first = caller.submit({"n": 1}, key="invoice 17")
    again = caller.submit({"n": 1.0}, key="invoice 17")  # equal to the database
    in_body = caller.submit({"n": 1}, context={"idempotencyKey": "invoice 17"})
    assert [answer.status_code for answer in (first, again, in_body)] == [202, 200, 200]
    assert {answer.json()["taskId"] for answer in (first, again, in_body)} == {
        str(keyed_id(FLAKY, f"{caller.name}:invoice 17"))
    }
    assert {answer.headers["location"] for answer in (first, again)} == {first.headers["location"]}
    assert [answer.json()["created"] for answer in (first, again)] == [True, False]
    assert work.rows("idempotency_key") == [(f"{caller.name}:invoice 17",)]


def test_the_same_key_with_another_payload_is_a_conflict_that_names_the_task(callers: Callers) -> None:
    caller = callers()
    first = caller.submit({"n": 1}, key="k").json()["taskId"]
    answer = caller.submit({"n": 2}, key="k")
    assert first in expect_error(answer, 409, "idempotency_conflict")
    assert answer.json()["error"]["taskId"] == first
    assert work.rows("payload") == [({"n": 1},)]


def test_the_same_key_of_two_principals_is_two_tasks(callers: Callers) -> None:
    one, other = callers(name="a"), callers(name="b")
    answers = [one.submit({"n": 1}, key="k"), other.submit({"n": 2}, key="k")]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert sorted(work.rows("idempotency_key, context ->> 'principal'")) == [("a:k", "a"), ("b:k", "b")]


def test_a_dead_task_of_one_principal_does_not_block_the_same_partition_key_of_another(callers: Callers) -> None:
    mallory, alice = callers(name="mallory"), callers(name="alice")
    blocking = mallory.submit({"fail": 9}, partitionKey="customer 17", retry={"max": 1}).json()["taskId"]
    deliver(engine(), [blocking])
    assert mallory.get(f"/api/tasks/{blocking}").json()["status"] == "DEAD"
    theirs = alice.submit(partitionKey="customer 17").json()["taskId"]
    deliver(engine(), [theirs])
    assert alice.get(f"/api/tasks/{theirs}").json()["status"] == "SUCCEEDED"
    assert sorted(work.rows("partition_key")) == [("alice:customer 17",), ("mallory:customer 17",)]


def test_a_shown_task_keeps_its_partition_key_when_it_is_submitted_again(callers: Callers) -> None:
    caller, other = callers(name="ci"), callers(name="other")
    shown = caller.get(caller.submit(partitionKey="k").headers["location"]).json()
    assert shown["partitionKey"] == "ci:k"
    for given in (caller, other):
        assert given.post("/api/tasks", json=shown).status_code == 202
    assert sorted(work.rows("partition_key")) == [("ci:k",), ("ci:k",), ("other:ci:k",)]
    expect_error(caller.submit(partitionKey=""), 400, "bad_task")


def test_a_client_cannot_impersonate_another_principal(callers: Callers) -> None:
    mallory, alice = callers(name="mallory"), callers(Scope.TASKS_READ, name="alice")
    id_ = mallory.submit(context={"principal": "alice", "idempotencyKey": "alice:k"}).json()["taskId"]
    expect_error(alice.get(f"/api/tasks/{id_}"), 404, "unknown_task")
    assert work.rows("idempotency_key, context ->> 'principal'") == [("mallory:alice:k", "mallory")]


@pytest.mark.guarantee
def test_one_key_from_many_clients_at_once_is_one_task(callers: Callers) -> None:
    caller = callers()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: caller.submit({"n": 1}, key="k"), range(24)))
    assert sorted(answer.status_code for answer in answers) == [200] * 23 + [202]
    assert len({answer.json()["taskId"] for answer in answers}) == 1
    assert len(work.rows()) == 1


def test_a_submit_does_not_wait_forever_for_another_transaction_with_the_same_key(
    callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(principals, "LOCK_SECONDS", 0.05)
    caller = callers(name="a")
    with sessions()() as session:
        submit(session, FLAKY, {"n": 1}, key="a:k")  # not committed
        answer = caller.submit({"n": 1}, key="k")
    expect_error(answer, 503, "ledger_busy")
    assert answer.headers["retry-after"] == "1"
    assert caller.submit({"n": 1}, key="k").status_code == 202


def test_a_deadlock_with_another_transaction_is_busy_and_can_be_repeated(
    callers: Callers, stack: ServersOfTests
) -> None:
    """The request holds its partition key and waits for its idempotency key; the other transaction does the reverse."""
    caller = callers(name="a")
    with Session(stack.cluster.superuser) as other, ThreadPoolExecutor(1) as pool:
        other.execute(text("SET LOCAL deadlock_timeout = '1min'"))  # so that the server ends the request
        submit(other, FLAKY, key="a:k")
        answer = pool.submit(caller.submit, key="k", partitionKey="p")
        wait_until(lambda: scalar("SELECT count(*) FROM pg_locks WHERE NOT granted") > 0, "the request waits")
        submit(other, FLAKY, partition_key="a:p")
        other.rollback()
    assert "repeat the whole transaction" in expect_error(answer.result(), 503, "ledger_busy")
    assert answer.result().headers["retry-after"] == "1"
    assert caller.submit(key="k", partitionKey="p").status_code == 202


def test_an_invalid_key_is_rejected(callers: Callers) -> None:
    caller = callers()
    for key in ("", "x" * 501, "tab\there"):
        expect_error(caller.submit(key=key), 400, "bad_task")
    assert work.rows() == []


def test_a_key_in_the_header_equals_the_same_utf_8_key_in_the_body(callers: Callers) -> None:
    caller = callers()
    body = {"type": FLAKY, "context": {"idempotencyKey": "Rechnung für 17 €"}}
    first = caller.post("/api/tasks", json=body)
    headers = {"Idempotency-Key": "Rechnung für 17 €".encode()}
    assert caller.post("/api/tasks", json={"type": FLAKY}, headers=headers).json()["taskId"] == first.json()["taskId"]
    expect_error(caller.post("/api/tasks", json=body, key="another"), 400, "bad_task")


@pytest.mark.parametrize("given", [[b"\xff"], [b"one", b"two"]])
def test_two_headers_or_a_key_that_is_not_utf_8_are_rejected(given: list[bytes]) -> None:
    request = Request({"type": "http", "headers": [(b"idempotency-key", each) for each in given]})
    with pytest.raises(Misuse):
        read_idempotency_key(request)


# invalid tasks


def test_an_invalid_task_is_rejected_with_its_own_code(callers: Callers) -> None:
    caller = callers()
    for body, status, code in INVALID:
        expect_error(caller.post("/api/tasks", content=body), status, code)
    assert work.rows() == []


def test_a_message_repeats_neither_a_long_input_nor_the_insides_of_python(callers: Callers) -> None:
    caller, long = callers(), "x" * 1_000_000
    bodies: list[Any] = [body for body, _, _ in INVALID]
    bodies += [
        {"type": long},
        {"type": FLAKY, "queue": long},
        {"type": FLAKY, "notify": long},
        {"type": FLAKY, long: 1},
    ]
    bodies += [{"type": FLAKY, "context": [long]}, {"type": FLAKY, "retry": 1}, [long], long]
    stages: list[Any] = [
        1,
        {"kind": long},
        {"kind": "python"},
        {"kind": "llm", "name": "a", "model": "m", "messages": [1]},
    ]
    bodies += [{"type": "workflow.execute", "payload": {"stages": [each]}} for each in stages]
    for body in bodies:
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = caller.post("/api/tasks", **given)
        message = answer.json()["error"]["message"]
        assert answer.status_code in (400, 413), answer.text
        assert len(message) <= 1010
        for internal in ("instance of", "sys.", "dictionary", "Submission", "TaskEnvelope", "pydantic", "Value error"):
            assert internal not in message
    assert "There is no type 'xxx" in caller.post("/api/tasks", json={"type": long}).json()["error"]["message"]


# visibility


def test_an_id_that_is_not_a_task_is_not_found(callers: Callers) -> None:
    caller = callers()
    for id_ in (uuid.uuid4(), "17", "no-id", "'; DROP TABLE ingest_task; --", "%00", "%ff", "x" * 9000):
        for path in ("", "/transitions"):
            assert len(expect_error(caller.get(f"/api/tasks/{id_}{path}"), 404, "unknown_task")) < 300


@pytest.mark.parametrize("path", ["", "/transitions"])
def test_a_task_of_another_principal_looks_like_one_that_does_not_exist(callers: Callers, path: str) -> None:
    owner = callers(Scope.TASKS_SUBMIT, Scope.TASKS_READ)
    address = owner.submit({"secret": 1}).headers["location"] + path
    assert owner.get(address).status_code == 200
    assert callers(Scope.TASKS_READ_ALL).get(address).status_code == 200
    stranger = callers(Scope.TASKS_READ)
    nothing = stranger.get(f"/api/tasks/{uuid.uuid4()}{path}")
    answer = stranger.get(address)
    expect_error(answer, 404, "unknown_task")
    assert _without_id(answer) == _without_id(nothing)


def test_a_task_not_submitted_over_http_is_visible_to_read_all_only(callers: Callers) -> None:
    with sessions().begin() as session:
        id_ = submit(session, FLAKY).task_id
    assert callers(Scope.TASKS_READ_ALL).get(f"/api/tasks/{id_}").json()["taskId"] == str(id_)
    expect_error(callers(Scope.TASKS_READ).get(f"/api/tasks/{id_}"), 404, "unknown_task")


def _without_id(answer: Any) -> str:
    text: str = answer.json()["error"]["message"]
    return text.replace(text.split()[4], "ID")
