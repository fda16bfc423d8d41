"""The `Finish` of a handler outside a transaction commits together with SUCCEEDED, or not at all."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy.orm import Session

from models.sql import sql
from tasks import Discard, Finish, Permanent, Snooze
from tasks.core.task import Task
from tests.servers import ServersOfTests
from tests.tasks.deliveries import (
    audits,
    delivered,
    handled,
    leases,
    scalar,
    submitted,
    take_away,
)
from tests.tasks.lost_workers import killed, reclaim_lost
from tests.tasks.outside import TYPE, ran, state
from tests.tasks.work import OnPurpose, effects, insert, task

pytestmark = pytest.mark.usefixtures("ledger")


def test_a_finish_commits_with_succeeded_and_its_result() -> None:
    id_ = ran(lambda each: Finish(lambda db: insert(each, db), {"rows": 1}))
    assert (task(id_)["status"], task(id_)["result"], effects()) == ("SUCCEEDED", {"rows": 1}, {id_: 1})
    assert scalar("SELECT count(DISTINCT xmin::text) FROM (SELECT xmin FROM public.test_sink UNION ALL"
                  " SELECT xmin FROM ledger.ingest_task) AS found") == 1, "all in one transaction"  # fmt: skip


def test_an_asynchronous_finish_fails_because_it_is_not_awaited() -> None:
    async def write(_db: Session) -> None:
        """Write nothing."""

    assert state(ran(lambda _: Finish(write)))[:2] == ("RETRYING", 1)


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Discard("old"), ("DISCARDED", 0, None)),
        (Permanent("never"), ("DEAD", 1, "permanent")),
        (Snooze(60), ("RETRYING", 0, None)),
        (OnPurpose("no"), ("RETRYING", 1, "handler_error")),
        (KeyError("mine"), ("DEAD", 1, "permanent")),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_finish_that_raises_leaves_no_effect(error: Exception, expected: Any) -> None:
    def fail(each: Task, db: Session) -> None:
        insert(each, db)
        raise error

    id_ = ran(lambda each: Finish(lambda db: fail(each, db), 1), permanent=[KeyError])
    assert (state(id_), effects(), leases()) == (expected, {}, 0)


def test_a_finish_with_a_serialization_failure_is_repeated_without_calling_the_handler_again() -> None:
    called: list[str] = []

    def write(each: Task, db: Session) -> None:
        insert(each, db)
        called.append("write")
        if called.count("write") < 3:
            db.execute(sql("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$"))

    def work(each: Task) -> Finish:
        called.append("handler")
        return Finish(lambda db: write(each, db))

    id_ = ran(work)
    assert called == ["handler", "write", "write", "write"]
    assert (state(id_), effects()) == (("SUCCEEDED", 0, None), {id_: 1})


@pytest.mark.parametrize("what", ["bad result", "commit", "deferred"])
def test_a_finish_that_cannot_be_committed_fails_its_task(what: str) -> None:
    def write(each: Task, db: Session) -> None:
        insert(each, db)
        if what == "commit":
            db.commit()
        if what == "deferred":
            db.execute(sql("CREATE TEMP TABLE one (n int UNIQUE DEFERRABLE INITIALLY DEFERRED) ON COMMIT DROP"))
            db.execute(sql("INSERT INTO one VALUES (1), (1)"))

    id_ = ran(lambda each: Finish(lambda db: write(each, db), object() if what == "bad result" else None))
    assert state(id_)[:2] == ("DEAD" if what == "commit" else "RETRYING", 1)
    assert (effects(), leases()) == ({}, 0)


@pytest.mark.parametrize("when", ["before", "in"])
def test_a_lease_lost_before_or_during_the_finish_leaves_no_effect(when: str) -> None:
    def write(each: Task, db: Session) -> None:
        insert(each, db)
        if when == "in":
            take_away(each.id)

    def work(each: Task) -> Finish:
        if when == "before":
            take_away(each.id)
        return Finish(lambda db: write(each, db))

    id_ = ran(work)
    assert (state(id_)[0], effects(), audits(), leases()) == ("RUNNING", {}, [(id_, "late_success")], 0)


@pytest.mark.guarantee
@pytest.mark.parametrize(("place", "is_done"), [
    ("ingest.in_handler=kill@1", False), ("ingest.in_handler=kill@2", False),
    ("ingest.after_effect=kill", False), ("ingest.after_settle=kill", True),
])  # fmt: skip
def test_a_worker_killed_around_the_finish_leaves_it_together_with_succeeded_or_not_at_all(
    place: str, is_done: bool, ledger: ServersOfTests
) -> None:
    def work(each: Task) -> Finish:
        return Finish(lambda db: insert(each, db))

    with handled(TYPE, work, transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        killed([id_], place)
        assert (task(id_)["status"], effects()) == (("SUCCEEDED", {id_: 1}) if is_done else ("RUNNING", {}))
        reclaim_lost(ledger)
        delivered([id_])
    assert (task(id_)["status"], effects()) == ("SUCCEEDED", {id_: 1})


def test_the_measured_time_of_a_task_includes_its_handler() -> None:
    def slow(_each: Task) -> Finish:
        threading.Event().wait(0.2)
        return Finish(lambda _db: None)

    ran(slow)
    assert scalar("SELECT run_seconds FROM ledger.task_tally") >= 0.2
