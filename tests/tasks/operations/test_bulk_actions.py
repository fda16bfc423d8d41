"""Bulk actions change exactly the tasks of their preview, and nothing that makes no sense can be ordered."""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

import settings
from models.bulk_actions import BulkVerb
from models.engine import engine
from models.errors import Misuse
from models.sql import sql
from models.status import TaskStatus
from outbox.relay import Relay
from tasks import broker
from tasks.execution.deliver import deliver
from tasks.operations import bulk_actions, bulk_statements, dead_tasks, wait_final
from tasks.operations.bulk_actions import UnknownBulkAction, filter_from_json, filter_to_json
from tasks.operations.bulk_run import work_off
from tasks.operations.listing import TaskFilter
from tests.servers import ServersOfTests
from tests.tasks import bulk, work
from tests.tasks.bulk import done, ordered, previewed, row, worked_off
from tests.tasks.command_line import DIES, FLAKY, buried, change, dead, statuses, submitted
from tests.tasks.deliveries import claimed, scalar

REQUEUE, DISCARD, RUN_NOW = BulkVerb
DLQ = "ingest.dlq"
LATER = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _look_often(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_final, "LOOK_SECONDS", 0.01)


def in_every_status() -> dict[str, uuid.UUID]:
    """Create one task for each status, and return them by name. What is queued comes last: a delivery runs it, too."""
    found = dict(zip(("retrying", "succeeded"), submitted({"fail": 9}, {}), strict=True))
    deliver(engine(), list(found.values()))
    change([found["retrying"]], "next_retry_at = next_retry_at + interval '1 hour'")
    (found["dead"],) = dead()
    (found["other"],) = buried(1, type="mail.send", error_code="timeout", error_message="It took 7 s.")
    (found["running"],) = submitted({}, type="test.insert")
    claimed([found["running"]])
    (found["later"],) = submitted({}, run_at=LATER)
    found["queued"], found["discarded"] = submitted({}, {})
    change([found["discarded"]], "status = 'DISCARDED', finished_at = (SELECT ledger.ledger_now())")
    return found


def versions() -> dict[uuid.UUID, Any]:
    """Return what changes whenever a task changes."""
    return {id_: version for id_, *version in work.rows("id, status, attempt_count, next_retry_at, updated_at")}


CHOICES = [
    (REQUEUE, TaskFilter(), {"dead", "other"}),
    (REQUEUE, TaskFilter(type="mail.send"), {"other"}),
    (REQUEUE, TaskFilter({TaskStatus.DEAD}, error_text="TOOK"), {"other"}),
    (REQUEUE, TaskFilter({TaskStatus.RETRYING}), set()),
    (REQUEUE, TaskFilter(ids=[]), set()),
    (DISCARD, TaskFilter(), {"dead", "other", "queued", "later", "retrying"}),
    (DISCARD, TaskFilter({TaskStatus.QUEUED}), {"queued", "later"}),
    (DISCARD, TaskFilter(error_code="timeout"), {"other"}),
    (RUN_NOW, TaskFilter(), {"later", "retrying"}),
    (RUN_NOW, TaskFilter({TaskStatus.RETRYING}), {"retrying"}),
    (RUN_NOW, TaskFilter({TaskStatus.DEAD}), set()),
]


@pytest.mark.guarantee
@pytest.mark.parametrize(("verb", "chosen", "expected"), CHOICES)
def test_an_action_changes_exactly_the_tasks_that_its_preview_counted(
    verb: BulkVerb, chosen: TaskFilter, expected: set[str]
) -> None:
    tasks = in_every_status()
    before, preview = versions(), previewed(verb, chosen)
    action = done(verb, chosen)
    after = versions()
    assert {name for name, id_ in tasks.items() if before[id_] != after[id_]} == expected
    assert (action.state, action.changed, action.matched) == ("done", len(expected), len(expected))
    assert set(action.sample) == {tasks[name] for name in expected}
    assert (preview.total, sum(group.count for group in preview.groups)) == (len(expected), len(expected))
    assert (preview.left_out, preview.is_exact) == (0, True)


def test_tasks_are_requeued_discarded_and_made_due_with_a_trace_in_their_history() -> None:
    tasks = in_every_status()
    requeued, made_due = done(REQUEUE, TaskFilter(type=FLAKY)), done(RUN_NOW, TaskFilter({TaskStatus.RETRYING}))
    done(DISCARD, TaskFilter(type="mail.send"))
    names = ("dead", "other", "retrying")
    assert statuses([tasks[name] for name in names]) == ["QUEUED", "DISCARDED", "RETRYING"]
    words = (f"mended (bulk action {requeued.id})", "console:ann")
    assert work.transitions(tasks["dead"], "message, actor")[-1] == words
    audit = "SELECT worker_id || ': ' || detail FROM ledger.task_audit WHERE code = 'retry_now'"
    assert scalar(audit).startswith(f"console:ann: mended (bulk action {made_due.id}); was due at")
    assert work.wakeups()[-1].ids == [tasks["retrying"]]
    deliver(engine(), [tasks["dead"], tasks["retrying"]])
    assert [work.task(tasks[name])["attempt_count"] for name in ("dead", "retrying")] == [1, 2]


def test_a_preview_counts_by_status_type_and_error() -> None:
    buried(3)
    buried(2, type="mail.send", error_code="timeout", error_message="It took 7 s.")
    submitted({}, {})
    found = previewed(DISCARD)
    groups = [(each.count, each.status, each.type, each.error_code, each.error_message) for each in found.groups]
    assert groups == [
        (3, "DEAD", FLAKY, "handler_error", "no"),
        (2, "DEAD", "mail.send", "timeout", "It took 7 s."),
        (2, "QUEUED", FLAKY, None, None),
    ]


def test_a_preview_of_more_tasks_than_it_may_read_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    buried(30)
    monkeypatch.setattr(bulk_statements, "COUNT_CEILING", 10)
    found = previewed(REQUEUE)
    assert (found.total, found.is_exact) == (10, False)
    assert done(REQUEUE).changed == 30


@pytest.mark.guarantee
def test_tasks_that_died_or_changed_after_the_preview_are_left_as_they_are() -> None:
    first, again, (waiting,) = buried(2), dead(DIES), submitted({}, run_at=LATER)
    requeue, run_now = ordered(REQUEUE), ordered(RUN_NOW)
    assert list(dead_tasks.requeue(engine(), dead_tasks.Choice(ids=again), actor="bob")) == [again]
    deliver(engine(), again)
    new = buried(2)
    change([waiting], "updated_at = (SELECT ledger.ledger_now())")
    worked_off(), worked_off()
    assert (row(requeue).changed, row(run_now).changed) == (2, 0)
    assert statuses([*first, *again, *new]) == ["QUEUED"] * 2 + ["DEAD"] * 3
    assert work.task(waiting)["next_retry_at"] > work.task(waiting)["updated_at"]


def test_tasks_held_by_another_operator_are_not_counted_as_changed() -> None:
    ids = sorted(buried(30))
    with engine().begin() as other:
        lock = sql("SELECT FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[])) FOR UPDATE")
        other.execute(lock, {"ids": ids[:10]})
        action = done()
    assert (action.state, action.matched, action.changed) == ("done", 30, 20)
    assert Counter(statuses(ids)) == {"DEAD": 10, "QUEUED": 20}


def test_more_tasks_than_one_batch_are_changed_once_each() -> None:
    ids = buried(1203)
    action = done()
    assert (action.changed, len(action.sample)) == (1203, 50)
    assert Counter(id_ for wakeup in work.wakeups() for id_ in wakeup.ids) == dict.fromkeys(ids, 1)


def test_the_dead_letter_queue_is_in_step_afterwards() -> None:
    relay = Relay.of(settings.current())
    dead(DIES, DIES, DIES)
    (left,) = buried(1, type="mail.send")
    relay.tick()
    assert broker.depths([DLQ])[DLQ] == 3
    assert done(REQUEUE, TaskFilter(type=FLAKY)).message is None
    relay.tick()
    relay.close()
    assert broker.depths([DLQ])[DLQ] == 1
    assert statuses([left]) == ["DEAD"]


def test_an_unreachable_broker_does_not_stop_an_action(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = buried(2)
    ordered()
    monkeypatch.setattr(broker, "app", Celery(broker="redis://127.0.0.1:1/0", set_as_current=False))
    action = worked_off()
    assert (action.state, statuses(ids)) == ("done", ["QUEUED"] * 2)
    assert "the next prune does it" in (action.message or "")


# what can be ordered


def test_tasks_whose_sinks_have_forgotten_their_keys_are_requeued_only_if_duplicates_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = {"url": "postgresql://me@127.0.0.1:1/none", "guarantee": "keyed", "key_life_hours": 48}
    monkeypatch.setenv("SINKS", json.dumps({"place": place}))
    settings.current.cache_clear()
    with engine().begin() as connection:
        connection.execute(sql(f"INSERT INTO ledger.sink_use (type, sink) VALUES ('{FLAKY}', 'place')"))
    young, old = buried(3), buried(2)
    change(old, "created_at = created_at - interval '49 hours'")
    preview = previewed(REQUEUE)
    assert (preview.total, preview.left_out) == (5, 2)
    action = done()
    assert (action.matched, action.left_out, action.wanted, action.changed) == (5, 2, 3, 3)
    assert statuses([*young, *old]) == ["QUEUED"] * 3 + ["DEAD"] * 2
    action = done(accept_duplicates=True)
    assert (action.matched, action.left_out, action.changed) == (2, 0, 2)
    assert previewed(DISCARD).left_out == 0, "discarding repeats no effect"


def test_steps_are_forgotten_only_if_that_was_asked_for() -> None:
    first, second = buried(2)
    with engine().begin() as connection:
        insert = sql("INSERT INTO ledger.task_step (task_id, name) VALUES (:id, 'charge')")
        connection.execute(insert, [{"id": first}, {"id": second}])
    done(chosen=TaskFilter(ids=[first]))
    assert scalar("SELECT count(*) FROM ledger.task_step") == 2
    done(chosen=TaskFilter(ids=[second]), reset_steps=True)
    assert scalar("SELECT task_id FROM ledger.task_step") == first


@pytest.mark.parametrize(
    ("verb", "how", "why"),
    [
        (REQUEUE, {"reason": " "}, "Give a reason"),
        (REQUEUE, {"reason": "x" * 501}, "Give a reason"),
        (REQUEUE, {"per_second": 0}, "The rate must be"),
        (REQUEUE, {"per_second": float("nan")}, "The rate must be"),
        (REQUEUE, {"per_second": float("inf")}, "The rate must be"),
        (REQUEUE, {"canary": 0, "canary_seconds": 1}, "There can be 1 to 100 canaries"),
        (REQUEUE, {"canary": 101, "canary_seconds": 1}, "There can be 1 to 100 canaries"),
        (REQUEUE, {"canary": 1}, "Wait for canaries between"),
        (REQUEUE, {"canary": 1, "canary_seconds": 3601}, "Wait for canaries between"),
        (DISCARD, {"canary": 1, "canary_seconds": 1}, "Only tasks that run again"),
        (DISCARD, {"accept_duplicates": True}, "Only dead tasks"),
        (RUN_NOW, {"reset_steps": True}, "Only dead tasks"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(verb: BulkVerb, how: dict[str, Any], why: str) -> None:
    with pytest.raises(Misuse, match=why):
        ordered(verb, **how)
    assert scalar("SELECT count(*) FROM ledger.bulk_action") == 0


def test_the_filter_of_a_principal_is_refused_because_no_statement_would_apply_it() -> None:
    with pytest.raises(Misuse, match="one principal"):
        ordered(chosen=TaskFilter(principal="ann"))


def test_an_order_that_is_given_twice_is_one_action() -> None:
    id_ = uuid.uuid4()
    ordered(id=id_), ordered(id=id_, reason="another")
    assert row(id_).reason == "mended"
    assert scalar("SELECT count(*) FROM ledger.bulk_action") == 1


def test_an_action_from_the_future_is_one_of_now() -> None:
    (id_,) = buried(1)
    ordered(as_of=work.task(id_)["created_at"] + timedelta(days=1))
    (late,) = buried(1)
    worked_off()
    assert statuses([id_, late]) == ["QUEUED", "DEAD"]


def test_every_filter_is_stored_and_read_back() -> None:
    at = work.task(buried(1)[0])["created_at"]
    full = TaskFilter(
        frozenset({TaskStatus.DEAD}),
        "t",
        "q",
        since=at,
        until=at + LATER,
        error_code="timeout",
        ids=sorted([uuid.uuid4(), uuid.uuid4()], key=str),
        partition_key="p",
        error_fingerprint="ab",
        error_text="no 'such' file",
    )
    for chosen in (full, TaskFilter(frozenset()), TaskFilter(frozenset(), ids=[])):
        assert filter_from_json(json.loads(json.dumps(filter_to_json(chosen)))) == chosen


def test_an_unknown_action_is_an_error() -> None:
    for call in (bulk_actions.stop, bulk_actions.go_on):
        with pytest.raises(UnknownBulkAction):
            call(engine(), uuid.uuid4(), actor="ann")


def test_a_claim_without_an_action_to_do_ends_without_a_change() -> None:
    id_ = ordered()
    claim = bulk.claimed()
    with engine().begin() as connection:
        connection.execute(sql("DELETE FROM ledger.bulk_action"))
    work_off(engine(), claim, stopped=threading.Event())
    with pytest.raises(UnknownBulkAction):
        row(id_)
