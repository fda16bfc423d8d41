"""Envelopes: the JSON of a task, and everything that is refused before it is stored."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

import pytest

import settings
from models.errors import Misuse
from models.status import STATUS_ALIASES, TaskStatus
from outbox.canonical_json import MAX_BYTES, MAX_DEPTH, MAX_KEYS
from tasks.core.registry import handler
from tasks.core.task_ids import fresh_id, keyed_id
from tasks.submission.envelope import KEY_LIMIT, BadTask, NewTask, TaskEnvelope, check_task
from tasks.submission.json_lines import read_envelope
from tests.tasks import work

ENVELOPE = """{
  "taskId": "6f1b0c3e-8a52-4a7e-9a53-3f0c8f1d2b11",
  "type": "workflow.execute",
  "payload": {"workflow": 17},
  "context": {
    "idempotencyKey": "workflow 17, stage 2",
    "traceId": "4bf92f3577b34da6a3ce929d0e0e4736",
    "user": {"name": "Ada"}
  },
  "retry": {
    "count": 0,
    "max": 3,
    "nextAttemptAt": 0
  },
  "status": "pending",
  "createdAt": "2026-01-01T10:00:00Z",
  "updatedAt": "2026-01-01T10:00:01Z"
}"""


def read(envelope: Any) -> NewTask:
    return read_envelope(json.dumps(envelope).encode())


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = [value]
    return value


def test_a_complete_envelope_is_read() -> None:
    assert read_envelope(ENVELOPE.encode()) == NewTask(
        "workflow.execute",
        {"workflow": 17},
        key="workflow 17, stage 2",
        max_attempts=3,
        context={"traceId": "4bf92f3577b34da6a3ce929d0e0e4736", "user": {"name": "Ada"}},
    )


def test_an_envelope_needs_only_a_type() -> None:
    assert read({"type": "t"}) == NewTask("t")


@pytest.mark.parametrize(
    ("given", "status"), [*STATUS_ALIASES.items(), *((one.value, one) for one in TaskStatus)], ids=str
)
def test_a_status_may_have_an_older_name(given: str, status: TaskStatus) -> None:
    assert TaskEnvelope.model_validate({"type": "t", "status": given}).status is status


def test_further_fields_of_a_context_are_stored_even_if_they_are_null() -> None:
    context = {"idempotencyKey": "k", "trace_id": "not ours", "tenant": None, "user": {"name": None}, "ключ": [1, None]}
    new = read({"type": "t", "context": context})
    assert new.key == "k"
    assert new.context == {name: value for name, value in context.items() if name != "idempotencyKey"}


def test_the_state_in_an_envelope_is_not_stored() -> None:
    given = {
        "taskId": str(uuid.uuid4()),
        "type": "t",
        "payload": [1],
        "retry": {"count": 2, "max": 3, "nextAttemptAt": "2026-01-01T10:00:00+02:00"},
        "status": "SUCCEEDED",
    }
    due_at = datetime(2026, 1, 1, 8, tzinfo=UTC)
    assert read(given) == NewTask("t", [1], run_at=due_at, max_attempts=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "`type` is required"),
        ([], "it must be a JSON object"),
        ({"type": 1}, "`type`: "),
        ({"type": "t", "status": "running away"}, "`status`: "),
        ({"type": "t", "retry": {"count": -1}}, "`retry.count`: "),
        ({"type": "t", "retry": {"max": 0}}, "`retry.max`: "),
        ({"type": "t", "retry": {"nextAttemptAt": "soon"}}, "`retry.nextAttemptAt`: "),
        ({"type": "t", "context": []}, "`context` must be a JSON object"),
        ({"type": "t", "context": {"idempotencyKey": 17}}, "`context.idempotencyKey`: "),
    ],
    ids=str,
)
def test_an_invalid_envelope_is_refused(given: Any, message: str) -> None:
    with pytest.raises(Misuse) as refused:
        read(given)
    assert refused.value.code == "bad_task"
    assert refused.value.message.startswith(f"The task is invalid: {message}")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"paylod": {"fail": 1}}, "'paylod'"),
        ({"max_retries": 3}, "'max_retries'"),
        ({"run_ta": None}, "'run_ta'"),
        ({"retry": {"maximum": 3}}, "'retry.maximum'"),
        ({"x" * 1000: 1}, "'xxx"),
        ({"type": 1, "paylod": 1}, "'paylod'"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_misspelt_field_is_refused_and_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(Misuse) as refused:
        read({"type": "t", **given})
    assert refused.value.code == "unknown_field"
    assert f"There is no field {named}" in refused.value.message
    assert len(refused.value.message) < 500


def test_every_field_beside_context_and_retry_takes_effect() -> None:
    given = {"queue": "q", "priority": 9, "runAt": "2026-01-01T10:00:00Z", "partitionKey": "p", "notify": "n"}
    due_at = datetime(2026, 1, 1, 10, tzinfo=UTC)
    expected = NewTask("t", queue="q", priority=9, run_at=due_at, partition_key="p", notify="n")
    assert read({"type": "t", **given}) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"idempotencyKey": "k"},
        {"idempotencyKey": "k", "context": {"idempotencyKey": "another"}},
        {"maxAttempts": 3},
        {"maxAttempts": 3, "retry": {"max": 4}},
        {"nextRetryAt": "2026-01-01T10:00:00Z"},
    ],
    ids=str,
)
def test_two_fields_that_contradict_each_other_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(BadTask, match=f"`{next(iter(given))}` and `(context|retry).*` differ"):
        read({"type": "t", **given})


class NoOffset(tzinfo):
    """A time zone without an offset."""

    def utcoffset(self, _at: datetime | None) -> None:
        return None

    dst = tzname = utcoffset


WEST = timezone(timedelta(hours=-12))


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"payload": "x" * (MAX_BYTES - 1)}, "payload_too_large"),
        ({"payload": "é" * (MAX_BYTES // 2)}, "payload_too_large"),
        ({"payload": nested(MAX_DEPTH + 1)}, "payload_too_deep"),
        ({"payload": nested(100_000)}, "payload_too_deep"),
        ({"payload": [{str(n): n} for n in range(MAX_KEYS + 1)]}, "payload_too_many_keys"),
        ({"payload": {"a": "x\x00y"}}, "payload_has_nul"),
        ({"payload": {"x\x00y": "a"}}, "payload_has_nul"),
        ({"payload": object()}, "payload_not_json"),
        ({"payload": {1: "a", "1": "b"}}, "payload_not_json"),
        ({"payload": [float("nan")]}, "payload_not_json"),
        ({"payload": [float("inf")]}, "payload_not_json"),
        ({"payload": 10**5000}, "payload_not_json"),
        ({"payload": "\ud800"}, "payload_not_json"),
        ({"context": {"a": "x" * MAX_BYTES}}, "payload_too_large"),
        ({"context": {"a": "\x00"}}, "payload_has_nul"),
        ({"context": {"a": {1}}}, "payload_not_json"),
        ({"context": [("a", 1)]}, "bad_task"),
        ({"context": "text"}, "bad_task"),
        ({"type": ""}, "unknown_type"),
        ({"type": "a b"}, "unknown_type"),
        ({"type": "x" * 1_000_000}, "unknown_type"),
        ({"type": 17}, "unknown_type"),
        ({"queue": "elsewhere"}, "unknown_queue"),
        ({"queue": "system"}, "unknown_queue"),
        ({"notify": "nowhere"}, "unknown_destination"),
        ({"notify": "celery:ingest"}, "unknown_destination"),
        ({"priority": -1}, "bad_task"),
        ({"priority": 10}, "bad_task"),
        ({"priority": True}, "bad_task"),
        ({"priority": 5.5}, "bad_task"),
        ({"priority": "5"}, "bad_task"),
        ({"max_attempts": 0}, "bad_task"),
        ({"max_attempts": 2**31}, "bad_task"),
        ({"max_attempts": 2.5}, "bad_task"),
        ({"key": ""}, "bad_task"),
        ({"key": "x" * (KEY_LIMIT + 1)}, "bad_task"),
        ({"key": "a\x1fb"}, "bad_task"),  # separates type and key in the hash
        ({"key": "a\nb"}, "bad_task"),
        ({"key": "a\x00b"}, "bad_task"),
        ({"key": "a\x85b"}, "bad_task"),
        ({"key": "\udc00"}, "bad_task"),
        ({"key": 17}, "bad_task"),
        ({"run_at": datetime(2026, 1, 1)}, "bad_task"),
        ({"run_at": datetime(2026, 1, 1, tzinfo=NoOffset())}, "bad_task"),
        ({"run_at": datetime.max.replace(tzinfo=WEST)}, "bad_task"),  # in UTC a year that Python cannot represent
        ({"run_at": timedelta.max}, "bad_task"),
        ({"run_at": timedelta.min}, "bad_task"),
        ({"run_at": 60}, "bad_task"),
        ({"run_at": "tomorrow"}, "bad_task"),
        ({"partition_key": ""}, "bad_task"),
        ({"partition_key": "a\x00b"}, "bad_task"),
    ],
    ids=lambda given: given if isinstance(given, str) else "+".join(given),
)
def test_an_invalid_task_is_refused_with_a_code_and_a_sentence(given: dict[str, Any], code: str) -> None:
    with pytest.raises(Misuse) as refused:
        check_task(NewTask(**{"type": "test.insert", **given}))
    assert refused.value.code == code
    assert refused.value.message.endswith(".")
    assert len(refused.value.message) < 500


@pytest.mark.parametrize(
    "given",
    [
        {"payload": "x" * (MAX_BYTES - 2)},
        {"payload": nested(MAX_DEPTH)},
        {"payload": [{str(n): "{[:"} for n in range(MAX_KEYS)]},
        {"payload": "\\u0000"},
        {"payload": None},
        {"key": "k" * KEY_LIMIT},
        {"key": "ключ 鍵 é e\u0301 👩‍👩‍👧 a\u00a0b"},
        {"key": "  spaces and 'quotes' and \\ and {braces} and \" "},
        {"priority": 0},
        {"priority": 9},
        {"max_attempts": 1},
        {"run_at": datetime.min.replace(tzinfo=UTC)},
        {"run_at": datetime.max.replace(year=8999, tzinfo=UTC)},
        {"run_at": timedelta(days=365_000)},
        {"run_at": timedelta(days=-365_000)},
    ],
    ids="+".join,
)
def test_a_task_just_within_the_limits_is_accepted(given: dict[str, Any]) -> None:
    check_task(NewTask("test.insert", **given))


def test_defaults_come_from_the_handler_and_then_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGEST_MAX_ATTEMPTS", "4")
    monkeypatch.setenv("INGEST_QUEUES", "ingest,slow")
    settings.current.cache_clear()
    handler("test.slow", queue="slow", max_attempts=2, batch=7, priority=8)(work.insert)
    try:
        found = check_task(NewTask("test.slow"))
        assert (found.queue, found.priority, found.max_attempts, found.batch) == ("slow", 8, 2, 7)
        found = check_task(NewTask("test.slow", queue="ingest", max_attempts=9, priority=0))
        assert (found.queue, found.priority, found.max_attempts, found.batch) == ("ingest", 0, 9, 7)
        found = check_task(NewTask("test.insert"))
        assert (found.queue, found.priority, found.max_attempts, found.batch) == ("ingest", 5, 4, 1000)
    finally:
        settings.current.cache_clear()


def test_the_id_of_a_key_never_changes() -> None:
    """Other programs and existing ledgers have these ids."""
    assert keyed_id("invoice.import", "invoice 17") == uuid.UUID("2766fbee-858f-8448-9ab6-d1b60512154b")
    assert keyed_id("t", "ключ") == uuid.UUID("44c79f6a-289f-8e76-b15a-9da7aa7187e8")
    assert {keyed_id("t", "k").version, keyed_id("t", "k").variant} == {8, uuid.RFC_4122}
    assert len({keyed_id("a", "bc"), keyed_id("ab", "c"), keyed_id("a", "b"), keyed_id("b", "a")}) == 4


def test_ids_without_a_key_are_unique_and_ordered_by_time() -> None:
    ids = [fresh_id() for _ in range(10_000)]
    assert len(set(ids)) == len(ids)
    assert {(one.version, one.variant) for one in ids} == {(7, uuid.RFC_4122)}
    milliseconds = [one.int >> 80 for one in ids]
    assert milliseconds == sorted(milliseconds)
