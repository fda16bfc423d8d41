"""Bulk actions keep their rate, stop if a canary fails, and go on after a stop or the death of their process."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection

from models.bulk_actions import BulkVerb
from models.engine import engine
from models.errors import Misuse
from models.sql import sql
from tasks.execution.deliver import deliver
from tasks.operations import bulk_actions, wait_final
from tasks.operations.bulk_run import claim_next
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until
from tests.tasks import bulk, work
from tests.tasks.bulk import done, ordered, row, worked_off
from tests.tasks.command_line import DIES, buried, dead, statuses
from tests.tasks.deliveries import at_commit, watching

REQUEUE, DISCARD, RUN_NOW = BulkVerb


class Died(BaseException):
    """What a process raises that is killed."""


@pytest.fixture(autouse=True)
def _look_often(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_final, "LOOK_SECONDS", 0.01)


def meanwhile(part: str, act: Callable[[], object], *, at: int = 1) -> Any:
    """Call `act` right before the process executes a statement with this part for the so-manieth time."""
    seen = 0

    def look(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        nonlocal seen
        seen += part in statement
        if part in statement and seen == at:
            act()

    return watching(engine(), "before_cursor_execute", look)


@contextmanager
def delivering(id_: uuid.UUID) -> Iterator[list[uuid.UUID]]:
    """Do the action in a thread, deliver its canaries when it has chosen them, and return their ids at the end."""
    thread = threading.Thread(target=worked_off)
    thread.start()
    wait_until(lambda: row(id_).canary_ids, "there are canaries")
    canaries = list(row(id_).canary_ids or ())
    deliver(engine(), canaries)
    thread.join(20)
    assert not thread.is_alive()
    yield canaries


# rate and canary


def test_a_rate_is_kept() -> None:
    buried(10)
    began_at = time.monotonic()
    assert done(per_second=20).changed == 10
    assert time.monotonic() - began_at >= 0.4, "the third batch of four begins after eight tasks"


@pytest.mark.guarantee
def test_the_others_are_changed_when_the_canaries_have_succeeded() -> None:
    ids = buried(12)
    id_ = ordered(canary=3, canary_seconds=60)
    with delivering(id_) as canaries:
        action = row(id_)
    assert (action.state, action.changed, action.canary_statuses) == ("done", 12, {"SUCCEEDED": 3})
    assert Counter(statuses(ids)) == {"SUCCEEDED": 3, "QUEUED": 9}
    assert set(statuses(canaries)) == {"SUCCEEDED"}


@pytest.mark.guarantee
def test_the_others_are_left_unchanged_if_a_canary_fails() -> None:
    ids = dead(*[DIES] * 5)
    id_ = ordered(canary=2, canary_seconds=60)
    with delivering(id_):
        action = row(id_)
    assert (action.state, action.changed, action.canary_statuses) == ("canary failed", 2, {"DEAD": 2})
    assert sum(len(work.transitions(each)) > 3 for each in ids) == 2
    with pytest.raises(Misuse, match="is canary failed"):
        bulk_actions.go_on(engine(), id_, actor="ann")


def test_the_others_are_left_unchanged_if_the_canaries_take_too_long() -> None:
    buried(5)
    action = done(canary=2, canary_seconds=1)
    assert (action.state, action.changed, action.canary_statuses) == ("canary failed", 2, {"QUEUED": 2})
    assert "Not all canaries succeeded in time (2 QUEUED)" in (action.message or "")


def test_canaries_that_another_operator_holds_do_not_let_the_others_pass() -> None:
    ids = buried(3)
    ordered(canary=1, canary_seconds=60)
    with engine().begin() as other:
        other.execute(sql("SELECT FROM ledger.ingest_task FOR UPDATE"))
        action = worked_off()
    assert (action.state, action.changed) == ("done", 0)
    assert set(statuses(ids)) == {"DEAD"}


@pytest.mark.guarantee
def test_an_action_whose_process_dies_after_its_canaries_failed_does_not_go_on_with_the_others(
    stack: ServersOfTests,
) -> None:
    buried(5)
    id_ = ordered(canary=2, canary_seconds=1)

    def die() -> None:
        raise Died

    with meanwhile("finished_at = (SELECT", die), pytest.raises(Died):
        worked_off()
    move(stack, 61)
    bulk_actions.go_on(engine(), id_, actor="console:bob")
    action = worked_off()
    assert (action.state, action.changed) == ("canary failed", 2)


# how an action ends early, and goes on


@pytest.mark.guarantee
def test_an_action_that_is_stopped_in_the_middle_of_a_batch_changes_nothing_more() -> None:
    ids = buried(60)
    id_ = ordered(per_second=100)
    with meanwhile("changed = changed +", lambda: bulk_actions.stop(engine(), id_, actor="console:bob"), at=2):
        action = worked_off()
    assert (action.state, action.changed, action.message) == ("stopped", 20, "Stopped by console:bob.")
    assert Counter(statuses(ids)) == {"QUEUED": 20, "DEAD": 40}
    with pytest.raises(Misuse, match=r"The bulk action is stopped\. It has ended already\."):
        bulk_actions.stop(engine(), id_, actor="console:bob")
    bulk_actions.go_on(engine(), id_, actor="console:eve")
    action = worked_off()
    assert (action.state, action.changed, action.matched) == ("done", 60, 60)
    assert action.message == "Stopped by console:bob. Continued by console:eve."
    assert Counter(id_ for wakeup in work.wakeups() for id_ in wakeup.ids) == dict.fromkeys(ids, 1)


def test_an_action_that_waits_can_be_stopped_before_it_begins() -> None:
    ids, id_ = buried(2), ordered()
    bulk_actions.stop(engine(), id_, actor="console:bob")
    assert claim_next(engine()) is None
    assert set(statuses(ids)) == {"DEAD"}


def test_the_end_of_the_process_stops_an_action_that_another_process_can_continue() -> None:
    ids, ends = buried(60), threading.Event()
    ordered(per_second=100)
    with meanwhile("changed = changed +", ends.set):
        action = worked_off(stopped=ends)
    assert (action.state, action.changed) == ("stopped", 20)
    assert action.message == "Stopped because the API process that did it was stopped."
    bulk_actions.go_on(engine(), action.id, actor="console:bob")
    assert worked_off().changed == 60
    assert set(statuses(ids)) == {"QUEUED"}


@pytest.mark.guarantee
def test_a_lost_process_that_wakes_up_after_its_action_was_continued_changes_nothing(stack: ServersOfTests) -> None:
    ids, id_ = buried(5), ordered()
    lost = bulk.claimed()
    assert not row(id_).is_lost
    with pytest.raises(Misuse, match="is running"):
        bulk_actions.go_on(engine(), id_, actor="console:bob")
    move(stack, 61)
    assert row(id_).is_lost
    bulk_actions.go_on(engine(), id_, actor="console:bob")
    ours = bulk.claimed()
    assert worked_off(lost).state == "running"
    assert (set(statuses(ids)), row(id_).changed) == ({"DEAD"}, 0)
    assert worked_off(ours).changed == 5


def test_two_processes_claim_an_action_once() -> None:
    id_ = ordered()
    with engine().begin() as other:
        other.execute(sql("SELECT FROM ledger.bulk_action WHERE id = :id FOR UPDATE"), {"id": id_})
        assert claim_next(engine()) is None, "another process is just claiming it"
    assert bulk.claimed().action.id == id_
    assert claim_next(engine()) is None


def test_actions_are_claimed_in_their_order() -> None:
    ids = [ordered() for _ in range(3)]
    assert [bulk.claimed().action.id for _ in ids] == ids


@pytest.mark.guarantee
def test_a_batch_whose_commit_is_lost_with_the_connection_is_repeated_and_counted_once() -> None:
    ids = buried(60)
    broken: list[bool] = []
    ordered(per_second=1000)

    def lose(connection: Connection) -> None:
        """Break the connection right before the first commit of a batch."""
        if connection.scalar(sql("SELECT changed FROM ledger.bulk_action")) and not broken:
            broken.append(True)
            with engine().connect() as killer:
                pid = connection.scalar(sql("SELECT pg_backend_pid()"))
                killer.execute(sql("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})

    with at_commit(engine(), lose):
        action = worked_off()
    assert broken
    assert (action.state, action.changed) == ("done", 60)
    assert Counter(id_ for wakeup in work.wakeups() for id_ in wakeup.ids) == dict.fromkeys(ids, 1)


def test_an_action_that_fails_is_stopped_with_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    ids, id_ = buried(2), ordered()
    with engine().begin() as connection:
        connection.execute(sql("""UPDATE ledger.bulk_action SET filter = '{"statuses": ["UNKNOWN"]}'"""))
    action = worked_off()
    assert (action.id, action.state) == (id_, "stopped")
    assert action.message == "Stopped by an error. The log of the API has the details."
    assert "'UNKNOWN' is not a valid TaskStatus" in caplog.text
    assert set(statuses(ids)) == {"DEAD"}
