"""A paused queue starts no task and loses none: not in the claim, not in the outbox, not when it is resumed."""

from __future__ import annotations

import uuid
from datetime import timedelta
from types import SimpleNamespace

import pytest
from sqlalchemy.exc import DBAPIError

import settings
from models.engine import engine
from models.sql import sql
from outbox import paused_queues
from outbox.after_commit_publisher import after_commit_publisher
from outbox.relay import Relay
from tasks import NewTask, broker, submit, submit_many, ticks
from tasks.core.outcomes import Snoozed
from tasks.core.registry import find
from tasks.execution.decision import Situation, decide
from tasks.execution.deliver import deliver
from tasks.operations.pauses import NoSuchQueue, pause_queue, resume_queue
from tasks.operations.rebuild_broker import count_due, wake_all_due
from tasks.submission.closed_queues import BacklogFull, QueueClosed, QueuePaused, tasks_are_accepted
from tests.outbox.ledger import move, woken
from tests.outbox.scripted import Clock
from tests.servers import ServersOfTests
from tests.tasks.command_line import manage
from tests.tasks.deliveries import claimed, submitted
from tests.tasks.pausing import pause, resume
from tests.tasks.wakeup_repair import repair_lost_wakeups
from tests.tasks.work import effects, rows, wakeups

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


def relay_once() -> None:
    assert after_commit_publisher().wait_until_idle(20)
    relay = Relay.of(settings.current())
    relay.tick()
    relay.close()


def published(stack: ServersOfTests) -> list[str]:
    """Publish what may be published; return the ids of all messages in the broker."""
    relay_once()
    return [id_ for message in woken(stack) for id_ in message]


def test_a_task_of_a_paused_queue_is_not_claimed_and_its_message_is_forgotten(ledger: ServersOfTests) -> None:
    ids = submitted(3)
    pause()
    deliver(engine(), ids)  # returns, so the message is acknowledged
    assert rows() == [("QUEUED", 0)] * 3
    found = claimed(ids)
    assert (found.tasks, sorted(found.paused)) == ([], sorted(ids))


def test_only_the_tasks_of_the_paused_queue_wait(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGEST_QUEUES", "ingest,other")
    settings.current.cache_clear()
    paused, free = submitted(2), submitted(2, queue="other")
    pause()
    deliver(engine(), [*paused, *free])
    assert effects() == dict.fromkeys(free, 1)


def test_a_task_with_a_partition_key_waits_for_its_paused_queue_too(ledger: ServersOfTests) -> None:
    ids = submitted(2, partition_key="a")
    pause()
    deliver(engine(), ids)
    assert effects() == {}
    assert resume() == 2
    deliver(engine(), ids)
    assert effects() == dict.fromkeys(ids, 1)


@pytest.mark.guarantee
def test_after_resume_every_task_that_became_due_during_the_pause_is_woken_and_runs_once(
    ledger: ServersOfTests,
) -> None:
    before = submitted(2)
    assert {uuid.UUID(id_) for id_ in published(ledger)} == set(before)
    deliver(engine(), published_and_taken(ledger))
    pause()
    during, later = submitted(3), submitted(1, run_at=timedelta(seconds=30))
    relay_once()
    move(ledger, 60)  # the scheduled task becomes due, too
    assert published(ledger) == []  # neither the submitter nor the relay publishes their wake-ups
    assert {each.status for each in wakeups()} == {"SENT"}
    assert repair_lost_wakeups() == 0
    assert resume() == 4
    deliver(engine(), published(ledger))
    assert effects() == dict.fromkeys([*before, *during, *later], 1)


def published_and_taken(stack: ServersOfTests) -> list[str]:
    """Return the ids in the broker's queue, and empty it."""
    ids = published(stack)
    broker.purge("ingest")
    return ids


def test_a_resume_that_was_interrupted_is_finished_by_the_search_for_lost_wakeups(ledger: ServersOfTests) -> None:
    pause()
    ids = submitted(2)
    relay_once()
    resume_queue(engine(), settings.current(), "ingest")  # and the process dies before it wakes them
    move(ledger, 11)
    assert repair_lost_wakeups() == 2
    deliver(engine(), published(ledger))
    assert effects() == dict.fromkeys(ids, 1)


def test_a_publisher_that_knows_of_no_pause_sees_one_within_a_second_and_its_end_at_once(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(paused_queues, "time", SimpleNamespace(monotonic=clock))
    known = paused_queues.PausedQueues()

    def is_paused() -> bool:
        with engine().connect() as connection:
            return known.is_paused(connection, "celery:ingest")

    assert not is_paused()
    pause()
    clock.now += 1
    assert is_paused()
    resume()
    assert not is_paused()


def test_rebuilding_the_broker_leaves_paused_queues_out(ledger: ServersOfTests) -> None:
    submitted(2)
    pause()
    with engine().connect() as connection:
        assert count_due(connection) == []
    assert list(wake_all_due(engine())) == []


def test_a_paused_intake_refuses_new_tasks_in_every_lane_and_those_it_has_still_run(ledger: ServersOfTests) -> None:
    ids = submitted(2)
    pause(intake=True, reason="a move")
    with pytest.raises(QueuePaused, match=r"'ingest'.*op@here has paused its intake: a move"):
        submit(engine(), "test.insert")
    with pytest.raises(QueuePaused):
        submit_many(engine(), [NewTask("test.insert"), NewTask("test.insert")])
    with engine().begin() as connection, pytest.raises(DBAPIError) as refused:
        connection.execute(sql("SELECT ledger.ingest_submit('test.insert', '{}')"))
    assert refused.value.orig.pgcode == "CL429"  # type: ignore[union-attr]
    assert rows() == [("QUEUED", 0)] * 2
    deliver(engine(), ids)
    assert effects() == dict.fromkeys(ids, 1)
    with tasks_are_accepted():  # a receipt `accepted` is a promise
        assert submit(engine(), "test.insert").created
    resume()
    assert submit(engine(), "test.insert").created


def test_one_refused_task_refuses_the_whole_call_and_nothing_is_submitted(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGEST_QUEUES", "ingest,other")
    settings.current.cache_clear()
    pause("other", intake=True)
    tasks = [NewTask("test.insert", queue="ingest")] * 1000 + [NewTask("test.scripted", queue="other")]
    with pytest.raises(QueuePaused):
        submit_many(engine(), tasks)  # the other chunk was inserted before
    assert rows() == []
    assert submit(engine(), "test.insert").created


@pytest.mark.parametrize("error", [QueuePaused(), BacklogFull(), QueueClosed()])
def test_a_handler_whose_own_submit_is_refused_is_snoozed_without_a_counted_attempt(
    ledger: ServersOfTests, error: QueueClosed
) -> None:
    outcome = decide(error, Situation(find("test.insert")))
    assert outcome == Snoozed(30, error.message)


def test_pausing_again_keeps_the_time_and_changes_the_reason(ledger: ServersOfTests) -> None:
    first = pause_queue(engine(), settings.current(), "ingest", actor="op@here", reason="one")
    move(ledger, 60)
    again = pause_queue(engine(), settings.current(), "ingest", actor="you@there", reason="two")
    assert (again.since, again.actor, again.reason) == (first.since, "you@there", "two")


def test_a_queue_that_does_not_exist_is_not_paused(ledger: ServersOfTests) -> None:
    with pytest.raises(NoSuchQueue, match=r"'ingset'; the queues are ingest"):
        pause("ingset")


def test_operators_pause_look_and_resume_on_the_command_line(ledger: ServersOfTests) -> None:
    submitted(2)
    assert manage("pause", "ingest", "--reason", "a [move]").code == 0
    assert manage("pause", "ingest", "--intake", "--json").json["intake"] is True
    (found,) = manage("queues", "--json").json["queues"]
    assert (found["due"], found["running"], found["takesTasks"]) == (2, 0, False)
    assert found["pause"]["reason"] == "a [move]"
    assert "a [move]; new tasks are refused since" in manage("queues").out
    assert manage("submit", "test.insert", "{}").code == 1
    assert manage("resume", "ingest", "--intake", "--json").json["woken"] == 0
    assert manage("submit", "test.insert", "{}").code == 0
    assert manage("resume", "ingest", "--json").json["woken"] == 3
    assert manage("resume", "ingest").out == "ingest was not paused.\n"
    nowhere = manage("pause", "nowhere")
    assert nowhere.code == 2
    assert "There is no queue 'nowhere'" in nowhere.err


def test_the_ticks_of_a_paused_queue_work(ledger: ServersOfTests) -> None:
    pause()
    submitted(2)
    assert ticks.run("reclaim")["wokenAgain"] == 0
    ticks.run("relay")
    assert broker.depths(["ingest"]) == {"ingest": 0}
