"""The envelope of a task: the seed's JSON, and everything that is refused before anything is stored."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

import pytest
from pydantic import ValidationError

import settings
from models.errors import Misuse
from models.status import TaskStatus
from outbox.canonical import MAX_BYTES, MAX_DEPTH, MAX_KEYS
from tasks.core.registry import handler
from tasks.core.task_ids import fresh_id, keyed_id
from tasks.submission.envelope import KEY_LIMIT, SEED_STATUSES, BadTask, NewTask, Submission, TaskEnvelope, checked
from tests.tasks import work

# seeds/001, "TaskEnvelope 设计", with values where it has dots
SEED = """{
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


@pytest.fixture(autouse=True, scope="module")
def _handlers() -> None:
    work.register()


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = [value]
    return value


def test_the_seeds_envelope_is_read_and_written_in_the_same_shape() -> None:
    envelope = TaskEnvelope.model_validate_json(SEED)
    written = envelope.model_dump(mode="json")
    assert written == {
        "taskId": "6f1b0c3e-8a52-4a7e-9a53-3f0c8f1d2b11",
        "type": "workflow.execute",
        "payload": {"workflow": 17},
        "context": {
            "idempotencyKey": "workflow 17, stage 2",
            "traceId": "4bf92f3577b34da6a3ce929d0e0e4736",
            "user": {"name": "Ada"},
        },
        "retry": {"count": 0, "max": 3, "nextAttemptAt": None},
        "status": "QUEUED",
        "createdAt": "2026-01-01T10:00:00Z",
        "updatedAt": "2026-01-01T10:00:01Z",
    }
    assert list(written) == ["taskId", "type", "payload", "context", "retry", "status", "createdAt", "updatedAt"]
    assert TaskEnvelope.model_validate(written) == envelope  # and once more
    assert TaskEnvelope.model_validate_json(envelope.model_dump_json()) == envelope


def test_the_least_envelope_is_a_type_and_is_written_with_every_name() -> None:
    assert TaskEnvelope.model_validate({"type": "t"}).model_dump(mode="json") == {
        "taskId": None,
        "type": "t",
        "payload": None,
        "context": {"idempotencyKey": None, "traceId": None, "user": None},
        "retry": {"count": 0, "max": None, "nextAttemptAt": None},
        "status": "QUEUED",
        "createdAt": None,
        "updatedAt": None,
    }


@pytest.mark.parametrize(
    ("given", "status"), [*SEED_STATUSES.items(), *((one.value, one) for one in TaskStatus)], ids=str
)
def test_a_status_is_understood_in_the_seeds_words_and_said_in_ours(given: str, status: TaskStatus) -> None:
    assert TaskEnvelope.model_validate({"type": "t", "status": given}).model_dump(mode="json")["status"] == status


def test_what_a_context_has_besides_is_kept_to_the_last_null() -> None:
    context = {"idempotencyKey": "k", "trace_id": "not ours", "tenant": None, "user": {"name": None}, "ключ": [1, None]}
    envelope = TaskEnvelope.model_validate({"type": "t", "context": context})
    assert envelope.model_dump(mode="json")["context"] == {**context, "traceId": None}
    new = envelope.new_task()
    assert new.key == "k"
    assert new.context == {name: value for name, value in context.items() if name != "idempotencyKey"}


def test_what_the_ledger_says_itself_is_not_taken_over_from_an_envelope() -> None:
    given = {
        "taskId": str(uuid.uuid4()),
        "type": "t",
        "payload": [1],
        "retry": {"count": 2, "max": 3, "nextAttemptAt": "2026-01-01T10:00:00+02:00"},
        "status": "SUCCEEDED",
    }
    due_at = datetime(2026, 1, 1, 8, tzinfo=UTC)
    assert TaskEnvelope.model_validate(given).new_task() == NewTask("t", [1], run_at=due_at, max_attempts=3)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"type": 1},
        {"type": "t", "status": "running away"},
        {"type": "t", "retry": {"count": -1}},
        {"type": "t", "retry": {"max": 0}},
        {"type": "t", "retry": {"nextAttemptAt": "soon"}},
        {"type": "t", "context": []},
        {"type": "t", "context": {"idempotencyKey": 17}},
    ],
    ids=str,
)
def test_what_is_no_envelope_is_refused(given: Mapping[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TaskEnvelope.model_validate(given)


@pytest.mark.parametrize("shape", [TaskEnvelope, Submission])
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"paylod": {"fail": 1}}, "'paylod'"),
        ({"max_retries": 3}, "'max_retries'"),
        ({"run_ta": None}, "'run_ta'"),
        ({"retry": {"maximum": 3}}, "'retry.maximum'"),
        ({"x" * 1000: 1}, "'xxx"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_field_that_there_is_not_is_refused_by_its_name(
    shape: type[TaskEnvelope], given: dict[str, Any], named: str
) -> None:
    with pytest.raises(Misuse) as refused:
        shape.model_validate({"type": "t", **given})
    assert refused.value.code == "unknown_field"
    assert f"There is no field {named}" in refused.value.message
    assert len(refused.value.message) < 500


def test_what_goes_beside_the_envelope_takes_effect() -> None:
    said = {"queue": "q", "priority": 9, "runAt": "2026-01-01T10:00:00Z", "partitionKey": "p", "notify": "n"}
    due_at = datetime(2026, 1, 1, 10, tzinfo=UTC)
    expected = NewTask("t", queue="q", priority=9, run_at=due_at, partition_key="p", notify="n")
    assert Submission.model_validate({"type": "t", **said}).new_task() == expected


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
def test_what_is_shown_twice_and_says_two_things_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(BadTask, match=f"{next(iter(given))} does not say the same as (context|retry)"):
        Submission.model_validate({"type": "t", **given}).new_task()


class NoOffset(tzinfo):
    """A time zone that does not know where it is."""

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
        ({"type": "test.nothing"}, "unknown_type"),
        ({"type": ""}, "unknown_type"),
        ({"queue": "elsewhere"}, "unknown_queue"),
        ({"queue": "system"}, "unknown_queue"),
        ({"notify": "nobody"}, "unknown_destination"),
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
        ({"key": "a\x1fb"}, "bad_task"),  # it separates type and key
        ({"key": "a\nb"}, "bad_task"),
        ({"key": "a\x00b"}, "bad_task"),
        ({"key": "a\x85b"}, "bad_task"),
        ({"key": "\udc00"}, "bad_task"),
        ({"key": 17}, "bad_task"),
        ({"run_at": datetime(2026, 1, 1)}, "bad_task"),
        ({"run_at": datetime(2026, 1, 1, tzinfo=NoOffset())}, "bad_task"),
        ({"run_at": datetime.max.replace(tzinfo=WEST)}, "bad_task"),  # a year that Python cannot read back
        ({"run_at": timedelta.max}, "bad_task"),
        ({"run_at": timedelta.min}, "bad_task"),
        ({"run_at": 60}, "bad_task"),
        ({"run_at": "tomorrow"}, "bad_task"),
        ({"partition_key": ""}, "bad_task"),
        ({"partition_key": "a\x00b"}, "bad_task"),
    ],
    ids=lambda given: given if isinstance(given, str) else "+".join(given),
)
def test_each_thing_that_is_wrong_has_its_own_code_and_a_sentence(given: dict[str, Any], code: str) -> None:
    with pytest.raises(Misuse) as refused:
        checked(NewTask(**{"type": "test.insert", **given}))
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
def test_what_is_just_within_the_limits_is_no_fault(given: dict[str, Any]) -> None:
    checked(NewTask("test.insert", **given))


def test_what_was_not_said_is_the_handlers_and_then_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGEST_MAX_ATTEMPTS", "4")
    monkeypatch.setenv("INGEST_QUEUES", "ingest,slow")
    settings.current.cache_clear()
    handler("test.slow", queue="slow", max_attempts=2, batch=7)(work.insert)
    try:
        found = checked(NewTask("test.slow"))
        assert (found.queue, found.max_attempts, found.batch) == ("slow", 2, 7)
        found = checked(NewTask("test.slow", queue="ingest", max_attempts=9))
        assert (found.queue, found.max_attempts, found.batch) == ("ingest", 9, 7)
        assert checked(NewTask("test.insert")).max_attempts == 4
    finally:
        settings.current.cache_clear()


def test_the_id_of_a_key_never_changes() -> None:
    """Written down: other programs and older ledgers have these ids."""
    assert keyed_id("invoice.import", "invoice 17") == uuid.UUID("2766fbee-858f-8448-9ab6-d1b60512154b")
    assert keyed_id("t", "ключ") == uuid.UUID("44c79f6a-289f-8e76-b15a-9da7aa7187e8")
    assert {keyed_id("t", "k").version, keyed_id("t", "k").variant} == {8, uuid.RFC_4122}
    assert len({keyed_id("a", "bc"), keyed_id("ab", "c"), keyed_id("a", "b"), keyed_id("b", "a")}) == 4


def test_ids_without_a_key_are_never_the_same_and_are_versioned_by_time() -> None:
    ids = [fresh_id() for _ in range(10_000)]
    assert len(set(ids)) == len(ids)
    assert {(one.version, one.variant) for one in ids} == {(7, uuid.RFC_4122)}
    milliseconds = [one.int >> 80 for one in ids]
    assert milliseconds == sorted(milliseconds)
