"""Tasks that wait for a limit and a pause at once, and what operators see and do while tasks wait for a limit."""

from __future__ import annotations

from typing import Any

import pytest

import settings
from models.engine import engine
from models.status import TaskStatus
from tasks.core.outcomes import Released
from tasks.execution import limits
from tasks.execution.settle import release_token
from tasks.operations.backlog import check_backlog
from tasks.operations.discard import cancel
from tasks.operations.gauges import read_gauges
from tasks.operations.pauses import resume_queue
from tasks.operations.queue_list import list_queues
from tasks.operations.rebuild_broker import wake_all_due
from tasks.operations.stats import read_stats
from tasks.recovery import limited_tasks
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import delivered, run_claim, scalar, submitted
from tests.tasks.limited import (
    TYPE,
    admitted,
    follow_wakeups,
    for_tenant,
    ids_of,
    last_event,
    limited,
    repaired,
    running,
    waiting,
    woken_ids,
)
from tests.tasks.pausing import pause, resume
from tests.tasks.work import rows, task

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@pytest.fixture
def two_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGEST_QUEUES", "ingest,bulk")
    settings.current.cache_clear()


@pytest.mark.guarantee
def test_tasks_with_limits_of_a_paused_queue_do_not_start_and_all_run_after_resume(stack: ServersOfTests) -> None:
    with limited(max_running=1):
        ids = submitted(4, TYPE)
        first = admitted(ids)
        assert (running(), waiting()) == (1, 3)
        new = submitted(2, TYPE)
        pause()
        before = last_event()
        run_claim(first)  # a task that runs is not interrupted; the place that it frees stays free
        delivered([*ids, *new])
        assert not admitted([*ids, *new]).tasks
        move(stack, 3600)
        assert repaired() == 0
        assert (running(), woken_ids(before)) == (0, [])
        resume()
        follow_wakeups(stack, after=before)
        assert rows("status, attempt_count") == [("SUCCEEDED", 0)] * 6


def test_a_wakeup_of_a_waiting_task_that_the_pause_has_dropped_is_sent_after_resume(stack: ServersOfTests) -> None:
    with limited(max_running=1):
        ids = submitted(3, TYPE)
        run_claim(admitted(ids))  # wakes the next one
        pause()
        move(stack, 3600)
        assert repaired() == 0
        before = last_event()
        resume()
        follow_wakeups(stack, after=before)
        assert rows("status") == [("SUCCEEDED",)] * 3


def test_waiting_tasks_are_woken_by_reclaim_if_the_resume_was_interrupted(stack: ServersOfTests) -> None:
    with limited(max_running=1):
        ids = submitted(3, TYPE)
        first = admitted(ids)
        pause()
        run_claim(first)
        before = last_event()
        resume_queue(engine(), settings.current(), "ingest")  # and the process dies before it wakes them
        assert repaired() == 1
        follow_wakeups(stack, after=before)
        assert rows("status") == [("SUCCEEDED",)] * 3


@pytest.mark.usefixtures("two_queues")
def test_waiting_tasks_of_a_paused_queue_take_no_place_from_those_of_another_queue() -> None:
    with limited(max_running=1):
        blocker, paused, free = submitted(1, TYPE), submitted(150, TYPE), submitted(2, TYPE, queue="bulk")
        first = admitted(blocker)
        for ids in (paused, free):
            admitted(ids)
        assert waiting() == 152
        pause()
        before = last_event()
        run_claim(first)
        (woken,) = woken_ids(before)
        assert woken in free
        assert ids_of(admitted([woken])) == [woken]


@pytest.mark.usefixtures("two_queues")
def test_a_lost_wakeup_behind_waiting_tasks_of_a_paused_queue_is_sent_again(stack: ServersOfTests) -> None:
    with limited(max_running=1):
        blocker, paused, free = submitted(1, TYPE), submitted(150, TYPE), submitted(2, TYPE, queue="bulk")
        first = admitted(blocker)
        for ids in (paused, free):
            admitted(ids)
        pause()
        run_claim(first)
        move(stack, 60)
        before = last_event()
        assert repaired() == 1
        assert woken_ids(before)[0] in free


def test_a_paused_queue_spends_no_token_of_a_rate() -> None:
    with limited(rate="1/d"):
        (id_,) = submitted(1, TYPE)
        pause()
        assert admitted([id_]).skipped == [id_]  # it was paused after the first look at its message
        assert task(id_)["limited_at"] is None
        resume()
        assert ids_of(admitted([id_])) == [id_]


def test_a_queue_that_is_paused_between_admission_and_claim_starts_no_task_and_loses_none(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def admit_and_pause(*given: Any, **how: Any) -> Any:
        found = admit(*given, **how)
        pause()
        return found

    admit = limits._admit
    with limited(max_running=1):
        ids = submitted(1, TYPE)
        with monkeypatch.context() as patched:
            patched.setattr(limits, "_admit", admit_and_pause)
            found = admitted(ids)
        assert (found.tasks, found.paused, found.skipped) == ([], ids, [])
        before = last_event()
        resume()
        follow_wakeups(stack, after=before)
        assert rows("status, attempt_count") == [("SUCCEEDED", 0)]


@pytest.mark.usefixtures("two_queues")
def test_limits_with_paused_tasks_only_do_not_keep_reclaim_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_tasks, "PAGE", 1)
    with limited(max_running=1, limit_by="tenant"):
        for ids in (for_tenant("acme", 2), for_tenant("beta", 2, queue="bulk"), for_tenant("gamma", 2)):
            admitted(ids)
        assert (running(), waiting()) == (3, 3)
    pause()
    with limited(max_running=2, limit_by="tenant"):
        before = last_event()
        assert [repaired() for _ in range(4)] == [0, 1, 0, 0]
        assert [task(id_)["queue"] for id_ in woken_ids(before)] == ["bulk"]


def test_a_claim_whose_answer_was_lost_gives_its_place_to_the_next_task() -> None:
    with limited(max_running=1):
        ids = submitted(3, TYPE)
        first = admitted(ids)
        before = last_event()
        release_token(engine(), first.lease.token, Released("the answer to its claim was lost"))
        assert running() == 0
        assert set(woken_ids(before)) - set(ids_of(first))


def test_a_waiting_task_can_be_cancelled_and_the_next_one_is_woken_in_its_place() -> None:
    with limited(max_running=1):
        ids = submitted(3, TYPE)
        run_claim(admitted(ids))
        (woken,) = [id_ for id_ in ids if task(id_)["limited_at"] and task(id_)["last_wakeup_at"]]
        before = last_event()
        assert cancel(engine(), woken, actor="me") == "QUEUED"
        (instead,) = woken_ids(before)
        assert ids_of(admitted([instead])) == [instead]


def test_waiting_tasks_are_in_all_counts_with_the_time_since_when_they_wait(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    with limited(max_running=1):
        ids = submitted(5, TYPE)
        first = admitted(ids)
        move(stack, 600)
        run_claim(first)  # changes the next one: it gets a wake-up
        with engine().connect() as connection:
            (kind,) = read_stats(connection).kinds
            (queue,) = list_queues(connection, settings.current()).queues
            gauges = read_gauges(connection)
        assert (kind.counts[TaskStatus.QUEUED], kind.due, kind.scheduled) == (4, 4, 0)
        assert queue.due == 4
        for age in (kind.oldest_due, queue.oldest_due):
            assert age is not None
            assert age.total_seconds() >= 600
        assert gauges.oldest_due["ingest"] >= 600
        (next_,) = admitted(ids).tasks
        assert (next_.waited_seconds or 0) >= 600
    monkeypatch.setenv("BACKLOG_ALERT_THRESHOLD", "2")
    settings.current.cache_clear()
    assert check_backlog(engine(), settings.current()) == 1


def test_rebuilding_the_broker_wakes_waiting_tasks_and_all_of_them_run(stack: ServersOfTests) -> None:
    with limited(max_running=2):
        ids = submitted(5, TYPE)
        run_claim(admitted(ids))
        admitted(ids)
        before = last_event()
        for _ in wake_all_due(engine()):
            pass
        assert scalar("SELECT count(*) FROM ledger.ingest_task WHERE status = 'SUCCEEDED'") == 1
        follow_wakeups(stack, after=before)
        assert rows("status", "status <> 'RUNNING'") == [("SUCCEEDED",)] * 4
