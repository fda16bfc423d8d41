"""The tasks of a lost worker run again: a task that was alone is charged, several are isolated."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.orm import Session

import settings
from models.engine import engine, sessions
from models.sql import sql
from tally.subjects import Subject
from tasks import NewTask, Task, handler, submit_many
from tasks.core import registry
from tasks.core.lease import HeldLease
from tasks.core.registry import handlers
from tasks.execution.claim import Claim
from tasks.execution.deliver import deliver
from tasks.execution.heartbeat import heartbeat
from tasks.recovery.reclaim import Reclaimed, reclaim_leases
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.command_line import manage
from tests.tasks.deliveries import at_commit, counted, leases, scalar, submitted
from tests.tasks.deliveries import claimed as claimed_by
from tests.tasks.lost_workers import LEASE, killed, later, start_child
from tests.tasks.work import SCRIPTS, effects, insert, rows, task, transitions, wakeups

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def claimed(ids: list[uuid.UUID]) -> Claim:
    return claimed_by(ids, holder="lost:1", lease_seconds=LEASE)


def reclaimed() -> Reclaimed:
    return reclaim_leases(engine(), settings.current())


def in_a_child(work: Callable[[], None]) -> None:
    """Run this in a forked process, and wait for its end."""
    os.waitpid(start_child(work), 0)


def test_a_task_that_was_alone_is_charged_and_woken_again(ledger: ServersOfTests) -> None:
    (id_,) = submitted(1)
    claimed([id_])
    later(ledger, LEASE - 1)
    assert reclaimed() == Reclaimed()
    later(ledger, 2)
    assert reclaimed() == Reclaimed(leases=1, charged=1)
    found = task(id_)
    assert (found["status"], found["attempt_count"], found["error_code"]) == ("RETRYING", 1, "worker_lost")
    assert "lost:1 was lost" in found["error_message"]
    assert [to for _, to in transitions(id_)] == ["QUEUED", "RUNNING", "RETRYING"]
    assert wakeups()[-1].due_at == found["next_retry_at"]


def test_a_worker_that_is_lost_while_postgresql_restarts_costs_no_attempt_until_the_third_time(
    ledger: ServersOfTests,
) -> None:
    """A worker that is stopped during the outage cannot write down that it releases its task."""
    (id_,) = submitted(1, max_attempts=1)
    statuses = []
    for _ in range(3):
        claimed([id_])
        scalar("""
            UPDATE ledger.task_lease SET is_extended = true, claimed_at = pg_postmaster_start_time() - interval '1 s'
            RETURNING 1
        """)
        later(ledger, LEASE + 1)
        reclaimed()
        statuses += rows("status, attempt_count, error_code")
    assert statuses == [("QUEUED", 0, None), ("QUEUED", 0, None), ("DEAD", 1, "worker_lost")]


def test_a_task_that_loses_its_worker_in_its_last_attempt_is_dead(ledger: ServersOfTests) -> None:
    (id_,) = submitted(1, max_attempts=1)
    claimed([id_])
    later(ledger, LEASE + 1)
    reclaimed()
    assert rows("status, attempt_count, error_code") == [("DEAD", 1, "worker_lost")]


def test_a_lease_that_cannot_be_reclaimed_does_not_delay_the_others(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = submitted(1), submitted(1, "test.fail")
    claimed(bad)
    move(ledger, 1)
    claimed(good)
    endless = dataclasses.replace(handlers()["test.insert"], backoff=(1e18,))
    monkeypatch.setitem(registry._registered, "test.insert", endless)
    later(ledger, LEASE + 1)
    assert reclaimed() == Reclaimed(1, charged=1)
    assert (task(bad[0])["status"], task(good[0])["status"]) == ("RUNNING", "RETRYING")
    assert counted(Subject.RECLAIM) == {"claimed": 1, "error": 1}


def test_a_lost_batch_is_not_charged_and_its_tasks_run_alone(ledger: ServersOfTests) -> None:
    ids = submitted(5)
    claimed(ids)
    later(ledger, LEASE + 1)
    assert reclaimed() == Reclaimed(leases=1, isolated=5)
    assert leases() == 0
    assert rows("status, attempt_count, isolated") == [("RETRYING", 0, True)] * 5
    assert sorted(len(wakeup.ids) for wakeup in wakeups())[:-1] == [1] * 5
    deliver(engine(), ids)
    assert rows("status, attempt_count") == [("SUCCEEDED", 0)] * 5
    assert set(effects().values()) == {1}


def test_a_task_that_crashes_its_process_does_not_harm_its_batch(ledger: ServersOfTests) -> None:
    """The 38th of 100 tasks causes a segmentation fault."""
    SCRIPTS["maybe"] = lambda each, db: (
        os.kill(os.getpid(), signal.SIGSEGV) if each.key == "poison" else insert(each, db)
    )
    payload = {"do": "maybe"}
    ids = submitted(37, "test.scripted", payload)
    with sessions()() as session:
        (poison,) = submit_many(session, [NewTask("test.scripted", payload, key="poison", max_attempts=3)])
        session.commit()
    ids += [poison.task_id, *submitted(62, "test.scripted", payload)]
    for _ in range(6):
        in_a_child(lambda: deliver(engine(), [i for i in ids if task(i)["status"] in ("QUEUED", "RETRYING")]))
        later(ledger, LEASE + 1)
        reclaimed()
        if not rows(where="status NOT IN ('SUCCEEDED', 'DEAD')"):
            break
        later(ledger, 600)
    assert rows("status, attempt_count, error_code", "idempotency_key = 'poison'") == [("DEAD", 3, "worker_lost")]
    assert set(rows("status, attempt_count", "idempotency_key IS NULL")) == {("SUCCEEDED", 0)}
    assert effects() == dict.fromkeys(set(ids) - {poison.task_id}, 1)


def test_a_worker_that_continues_after_its_lease_was_reclaimed_writes_nothing(ledger: ServersOfTests) -> None:
    ids = submitted(3, "test.scripted", {"do": "insert"})

    def lose_the_lease(*_: Any) -> None:
        later(ledger, LEASE + 1)
        assert reclaimed().isolated == 4
        deliver(engine(), ids)  # another worker finishes them

    SCRIPTS["lose"] = lose_the_lease
    SCRIPTS["insert"] = insert
    (slow,) = submitted(1, "test.scripted", {"do": "lose"})
    deliver(engine(), [slow, *ids])
    assert effects() == dict.fromkeys(ids, 1)
    with engine().begin() as connection:
        audits = connection.execute(sql("SELECT task_id, code FROM ledger.task_audit")).all()
    assert {code for _, code in audits} <= {"late_success", "lease_lost"}
    assert set(rows("status", f"id <> '{slow}'")) == {("SUCCEEDED",)}


def test_an_expired_lease_that_was_not_reclaimed_is_still_valid(ledger: ServersOfTests) -> None:
    SCRIPTS["slow"] = lambda *_: later(ledger, 3 * LEASE)
    (id_,) = submitted(1, "test.scripted", {"do": "slow"})
    deliver(engine(), [id_])
    assert rows() == [("SUCCEEDED", 0)]


def test_workers_can_renew_before_reclaim_when_it_has_not_run_for_long(ledger: ServersOfTests) -> None:
    ids = submitted(1)
    claim = claimed(ids)
    move(ledger, 10 * LEASE)  # no tick of reclaim is recorded: the database was unreachable
    assert reclaimed() == Reclaimed()
    with heartbeat().holding(claim.lease) as held:
        heartbeat().beat()
        assert held.is_good
    later(ledger, LEASE - 1)
    assert reclaimed() == Reclaimed()
    later(ledger, 2)
    assert reclaimed().charged == 1


def test_a_lease_shorter_than_the_reclaim_interval_is_reclaimed(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reclaim runs less than once per lease here, which must not count as an interruption."""
    monkeypatch.setenv("INGEST_LEASE_SECONDS", "3")
    monkeypatch.setenv("INGEST_RECLAIM_INTERVAL_MS", "5000")
    settings.current.cache_clear()
    later(ledger, 0)
    claimed(submitted(1))
    move(ledger, LEASE)
    charged = 0
    for _ in range(4):
        charged += reclaimed().charged
        later(ledger, 0)
        move(ledger, 5.5)
    assert charged == 1


@pytest.mark.guarantee
def test_reclaim_that_is_run_less_often_than_a_lease_takes_a_lost_lease_over_at_its_second_look(
    ledger: ServersOfTests,
) -> None:
    """At every look reclaim has not run for long, and a lease may be extended for that only once."""
    manage("reclaim", "--once")
    claimed(submitted(1))
    reclaimed_leases = []
    for _ in range(3):
        move(ledger, 10 * LEASE)
        reclaimed_leases.append(manage("reclaim", "--once", "--json").json["leases"])
    assert reclaimed_leases == [0, 1, 0]
    assert rows("status, attempt_count, error_code") == [("RETRYING", 1, "worker_lost")]


def test_one_transaction_of_reclaim_has_no_more_tasks_than_its_batch_size(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGEST_RECLAIM_BATCH_SIZE", "4")
    settings.current.cache_clear()
    for _ in range(5):
        claimed(submitted(2))
    later(ledger, LEASE + 1)
    left: list[int] = []

    def count_running(connection: Connection) -> None:
        running = sql("SELECT count(*) FROM ledger.ingest_task WHERE status = 'RUNNING'")
        left.append(connection.execute(running).scalar_one())

    with at_commit(engine(), count_running):
        assert reclaimed() == Reclaimed(leases=5, isolated=10)
    at_once = [before - after for before, after in itertools.pairwise([10, *left])]
    assert [tasks for tasks in at_once if tasks] == [4, 4, 2]


def test_a_heartbeat_notices_that_its_lease_was_reclaimed(ledger: ServersOfTests) -> None:
    claim = claimed(submitted(1))
    with heartbeat().holding(claim.lease) as held:
        later(ledger, LEASE + 1)
        reclaimed()
        heartbeat().beat()
        assert held.is_lost
        assert not held.is_good


def test_a_locked_lease_does_not_prevent_the_renewal_of_others(ledger: ServersOfTests) -> None:
    locked, other = claimed(submitted(1)), claimed(submitted(1))
    now = time.monotonic()
    with (
        heartbeat().holding(HeldLease(locked.token, now)) as waits,
        heartbeat().holding(HeldLease(other.token, now)) as renewed,
        engine().begin() as settling,
    ):
        settling.execute(sql("DELETE FROM ledger.task_lease WHERE token = :token"), {"token": locked.token})
        heartbeat().beat()
        assert (renewed.is_lost, renewed.deadline > now) == (False, True)
        assert (waits.is_lost, waits.deadline) == (False, now)


def test_a_handler_that_runs_for_three_leases_keeps_its_task(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGEST_LEASE_SECONDS", "1")
    settings.current.cache_clear()

    may_end = threading.Event()

    def take_long(task: Task, db: Session) -> None:
        insert(task, db)
        assert may_end.wait(60)

    SCRIPTS["long"] = take_long
    ids = submitted(1, "test.scripted", {"do": "long"})
    worker = threading.Thread(target=deliver, args=(engine(), ids))
    worker.start()
    reclaims, until = 0, time.monotonic() + 3.2
    while time.monotonic() < until or reclaims <= 10:
        later(ledger, 0)
        assert reclaimed() == Reclaimed()
        reclaims += 1
        time.sleep(0.1)
    may_end.set()
    worker.join()
    assert rows() == [("SUCCEEDED", 0)]
    assert effects() == {ids[0]: 1}


def test_a_handler_that_ignores_its_limits_loses_its_process_but_harms_no_other_task(ledger: ServersOfTests) -> None:
    handler("test.endless", soft_limit_seconds=0.1, hard_limit_seconds=0.3, max_attempts=1)(never_ends)
    (before,), (endless,), (after,) = (submitted(1, "test.endless", payload) for payload in (None, "endless", None))
    in_a_child(lambda: deliver(engine(), [before, endless, after]))
    later(ledger, LEASE + 1)
    assert reclaimed().isolated == 3
    in_a_child(lambda: deliver(engine(), [before, after, endless]))
    later(ledger, LEASE + 1)
    reclaimed()
    assert rows("status, attempt_count, error_code", f"id = '{endless}'") == [("DEAD", 1, "timeout")]
    assert set(rows("status, attempt_count", f"id <> '{endless}'")) == {("SUCCEEDED", 0)}
    assert effects() == dict.fromkeys((before, after), 1)


def never_ends(task: Task, db: Session) -> None:
    insert(task, db)
    while task.payload == "endless":
        try:
            time.sleep(1)
        except Exception:
            continue


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.guarantee
@pytest.mark.parametrize(
    "place", ["ingest.after_claim", "ingest.in_handler", "ingest.after_effect", "ingest.after_settle"]
)
def test_a_worker_that_is_killed_anywhere_leaves_each_effect_once(
    ledger: ServersOfTests, place: str, count: int
) -> None:
    ids = submitted(count)
    killed(ids, f"{place}=kill")
    deliver(engine(), ids)  # the broker delivers the message again while the tasks are still leased
    later(ledger, LEASE + 1)
    reclaimed()
    later(ledger, 600)
    deliver(engine(), ids)
    assert set(rows("status")) == {("SUCCEEDED",)}
    assert effects() == dict.fromkeys(ids, 1)
    assert leases() == 0
