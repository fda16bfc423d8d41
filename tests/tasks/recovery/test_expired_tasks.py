"""A task that has expired before it started never runs; a task that has started does not expire."""

from __future__ import annotations

import logging
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

import settings
from models.engine import engine
from models.sql import sql
from tasks import NewTask, Snooze, get, submit, submit_many, ticks
from tasks.core.outcomes import Released
from tasks.core.registry import handlers
from tasks.core.wakeups import wakeup_values
from tasks.execution.claim import claim
from tasks.execution.settle import release_token
from tasks.operations.task_details import read_details
from tasks.operations.why_waiting import QueueState, ReasonCode, reasons
from tasks.recovery.expired_tasks import BATCH, DISCARD_EXPIRED, REASON, discard_expired
from tasks.submission.envelope import BadTask, TaskEnvelope
from tests.tasks import plans
from tests.tasks.command_line import manage
from tests.tasks.deliveries import (
    change,
    claimed,
    claimed_in_turn,
    counted,
    delivered,
    handled,
    raising,
    scalar,
    scripted,
    submitted,
)
from tests.tasks.work import OnPurpose, effects, rows, task, transitions, wakeups

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HOUR = timedelta(hours=1)
PAST = "expires_at = ledger.ledger_now() - interval '1 second'"


def expired(count: int = 1, type: str = "test.insert", **how: Any) -> list[uuid.UUID]:
    """Submit tasks that have expired by now."""
    ids = submitted(count, type, expires=HOUR, **how)
    for id_ in ids:
        change(id_, PAST)
    return ids


def discard_all() -> int:
    return discard_expired(engine(), settings.current())


@pytest.mark.guarantee
def test_a_claim_never_starts_an_expired_task_neither_by_its_message_nor_to_fill_a_batch() -> None:
    (old,), (good,) = expired(), submitted()
    delivered([old])
    assert task(old)["status"] == "QUEUED"
    delivered([good])
    assert (task(good)["status"], task(old)["status"]) == ("SUCCEEDED", "QUEUED")
    assert effects() == {good: 1}
    assert claimed([old]).skipped == [old]


def test_a_claim_never_starts_an_expired_task_of_a_partition_key() -> None:
    first, second = submitted(2, partition_key="a", expires=HOUR)
    change(second, PAST)
    assert [each.id for each in claimed_in_turn([first]).tasks] == [first]
    assert claimed_in_turn([second]).skipped == [second]


def test_an_expired_task_takes_no_place_of_its_limit() -> None:
    with handled("test.rated", lambda _task: None, transactional=False, rate="1/h"):
        (old,), (good,) = expired(1, "test.rated"), submitted(1, "test.rated")
        delivered([old, good])
        assert (task(old)["status"], task(good)["status"]) == ("QUEUED", "SUCCEEDED")


def test_at_the_very_moment_of_its_expiry_a_task_no_longer_starts_and_is_discarded() -> None:
    (id_,) = submitted(expires=HOUR)
    now = (
        "CREATE OR REPLACE FUNCTION ledger.ledger_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE"
        f" RETURN CAST('{task(id_)['expires_at'].isoformat()}' AS timestamptz)"
    )
    with engine().connect() as connection:  # it is not committed
        connection.execute(sql(now))
        found = claim(connection, [id_], handlers=handlers(), holder="another:1", lease_seconds=60)
        assert found.skipped == [id_]
        assert discard_expired(connection, settings.current()) == 1  # type: ignore[arg-type]
    assert task(id_)["status"] == "QUEUED"


def test_a_time_that_has_passed_is_accepted_and_the_task_is_discarded() -> None:
    id_ = submit(engine(), "test.insert", expires=datetime.now(UTC) - HOUR).task_id
    delivered([id_])
    assert task(id_)["status"] == "QUEUED"
    assert discard_all() == 1
    assert transitions(id_, "to_status, message") == [("QUEUED", None), ("DISCARDED", REASON)]
    assert effects() == {}


def test_an_expired_task_without_a_wakeup_is_discarded_by_the_tick() -> None:
    (old,), (later,), (never,) = expired(), submitted(expires=HOUR), submitted()
    assert ticks.run("reclaim")["expired"] == 1
    assert [task(id_)["status"] for id_ in (old, later, never)] == ["DISCARDED", "QUEUED", "QUEUED"]
    assert transitions(old, "from_status, to_status, message")[-1] == ("QUEUED", "DISCARDED", REASON)
    assert get(old).finished_at is not None
    assert counted()["discarded"] == 1
    assert ticks.run("reclaim")["expired"] == 0


def test_more_expired_tasks_than_fit_on_one_page_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.recovery.expired_tasks.BATCH", 2)
    expired(5)
    assert discard_all() == 5
    assert rows("status") == [("DISCARDED",)] * 5


def test_expired_tasks_are_logged_once_with_their_ids_and_traces(caplog: pytest.LogCaptureFixture) -> None:
    (traced,), plain = expired(context={"traceparent": GIVEN}), expired(150)
    caplog.set_level(logging.INFO)
    discard_all()
    records: list[Any] = [record for record in caplog.records if getattr(record, "event", "") == "tasks_expired"]
    assert [record.count for record in records] == [100, 51]
    assert {record.type for record in records} == {"test.insert"}
    ids = [id_ for record in records for id_ in record.taskIds]
    assert sorted(ids) == sorted(str(id_) for id_ in [traced, *plain])
    traces = {trace for record in records for trace in record.traceIds}
    assert traces == {GIVEN[3:35], *(id_.hex for id_ in plain)}


def test_an_expired_task_frees_its_partition_key_and_sends_its_notification(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = submitted(2, partition_key="a", expires=HOUR)
    change(first, f"{PAST}, notify = 'results'")
    last = max(wakeup.id for wakeup in wakeups())
    assert discard_all() == 1
    assert [wakeup.ids for wakeup in wakeups(f"id > {last}")] == [[second]]
    found = scalar("SELECT payload ->> 'status' FROM ledger.outbox_event WHERE destination = 'results'")
    assert found == "DISCARDED"
    delivered([second])
    assert task(second)["status"] == "SUCCEEDED"


@pytest.mark.parametrize("does", [raising(OnPurpose("no")), raising(Snooze(60))], ids=["fails", "snoozes"])
def test_a_task_that_has_run_once_does_not_expire(does: Any) -> None:
    (id_,) = scripted(does, expires=HOUR)
    delivered([id_])
    assert (task(id_)["status"], task(id_)["expires_at"]) == ("RETRYING", None)
    assert discard_all() == 0


def test_a_task_that_was_started_and_released_does_not_expire() -> None:
    (id_,) = submitted(expires=HOUR)
    release_token(engine(), claimed([id_]).token, Released("the worker stopped"))
    assert (task(id_)["status"], task(id_)["expires_at"]) == ("QUEUED", None)


@pytest.mark.parametrize("expires", [HOUR, 3600, 3600.0, "a time"])
def test_an_expiry_is_a_time_or_a_duration_or_seconds(expires: Any) -> None:
    given = datetime.now(UTC) + HOUR if expires == "a time" else expires
    ids = [submit(engine(), "test.insert", expires=given).task_id]
    ids += [
        each.task_id for each in submit_many(engine(), [NewTask("test.insert", expires=given), NewTask("test.insert")])
    ]
    first, second, without = (task(id_)["expires_at"] for id_ in ids)
    for at in (first, second):
        assert abs(at - datetime.now(UTC) - HOUR) < timedelta(minutes=1)
    assert without is None


@pytest.mark.parametrize(
    ("expires", "message"),
    [
        (datetime(2030, 1, 1), "needs a time zone"),
        (timedelta(0), "in the future"),
        (-1, "in the future"),
        (float("inf"), "thousand years"),
        (float("nan"), "thousand years"),
        (timedelta(days=400_000), "thousand years"),
        (True, "must be a datetime"),
        ("soon", "must be a datetime"),
    ],
)
def test_a_bad_expiry_is_rejected(expires: Any, message: str) -> None:
    with pytest.raises(BadTask, match=message):
        submit(engine(), "test.insert", expires=expires)


def test_a_task_that_would_expire_before_it_is_due_is_rejected() -> None:
    at = datetime.now(UTC)
    for run_at, expires in ((HOUR, 60), (at + HOUR, at), (HOUR, HOUR)):
        with pytest.raises(BadTask, match="would expire before it is due"):
            submit(engine(), "test.insert", run_at=run_at, expires=expires)
    assert rows() == []


def test_an_envelope_has_expiry_and_a_shown_task_can_be_submitted_again() -> None:
    at = datetime.now(UTC) + HOUR
    new = TaskEnvelope.model_validate({"type": "test.insert", "expiresAt": at.isoformat()}).new_task()
    (submitted_,) = submit_many(engine(), [new])
    with engine().connect() as connection:
        shown = read_details(connection, submitted_.task_id).task.envelope()
    assert shown["expiresAt"] == at
    assert TaskEnvelope.model_validate(shown).new_task().expires == at


def test_the_command_line_submits_and_shows_the_expiry() -> None:
    manage("submit", "test.insert", "1", "--expires", "2h")
    ((id_, at),) = rows("id, expires_at")
    assert timedelta(minutes=119) < at - datetime.now(UTC) <= timedelta(minutes=120)
    assert f"{at.astimezone(UTC):%Y-%m-%d %H:%M}" in manage("show", id_).out


def test_a_task_says_that_it_has_expired() -> None:
    (id_,) = expired()
    assert _reasons(id_)[0] == ReasonCode.EXPIRED
    discard_all()
    with engine().connect() as connection:
        details = read_details(connection, id_)
    (reason,) = reasons(details, settings.current(), known_types=handlers())
    assert REASON in reason.message


def _reasons(id_: uuid.UUID) -> list[ReasonCode]:
    with engine().connect() as connection:
        details = read_details(connection, id_)
    found = reasons(details, settings.current(), known_types=handlers(), read_queue=lambda _: QueueState(0, None))
    return [each.code for each in found]


def test_the_search_for_expired_tasks_reads_no_task_without_expiry() -> None:
    submitted(1000)
    (old,) = expired()
    values = {"batch": BATCH, "reason": REASON, "actor": "me", "skipping": "{}"}
    with engine().connect() as connection:
        connection.execute(sql("ANALYZE ledger.ingest_task; SET LOCAL enable_seqscan = off"))
        values |= wakeup_values(Session(connection), settings.current().ingest_queues)
        assert plans.rows_read(connection, DISCARD_EXPIRED, values, part="held") == 1
        connection.commit()
    assert task(old)["status"] == "DISCARDED"
