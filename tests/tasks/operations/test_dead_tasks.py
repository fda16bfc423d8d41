"""Requeue and discard dead tasks: concurrent operators lose or double nothing, and the dead-letter queue follows."""

from __future__ import annotations

import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from kombu import Queue

import settings
from checks import workers
from models.clock import now
from models.engine import engine
from models.errors import Unreachable
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from outbox.relay import Relay
from tasks import broker, ticks
from tasks.execution.deliver import deliver
from tasks.operations.dead_letter_queue import sync
from tasks.operations.dead_tasks import Choice, count, discard, requeue
from tests.outbox.ledger import rows as events
from tests.servers import ServersOfTests
from tests.tasks import work
from tests.tasks.celery_settings import application, celery_settings
from tests.tasks.command_line import DIES, buried, change, dead, statuses

DLQ = "ingest.dlq"
LETTERS = f"destination = 'celery:{DLQ}'"


def all_of(batches: Iterator[list[uuid.UUID]]) -> list[uuid.UUID]:
    return [id_ for batch in batches for id_ in batch]


def requeued(choice: Choice | None = None, **how: Any) -> list[uuid.UUID]:
    done = all_of(requeue(engine(), choice or Choice(), actor="me@here", **how))
    assert after_commit_publisher().wait_until_idle(60)
    return done


# requeue and discard


def test_a_requeued_task_starts_again_and_keeps_its_history(stack: ServersOfTests) -> None:
    (task,) = dead()
    assert requeued(reason="mended") == [task]
    row = work.task(task)
    assert (row["status"], row["attempt_count"], row["finished_at"]) == ("QUEUED", 0, None)
    assert work.transitions(task)[-2:] == [("RUNNING", "DEAD"), ("DEAD", "QUEUED")]
    assert work.transitions(task, "message, actor")[-1] == ("mended", "me@here")
    assert work.wakeups()[-1].ids == [task]
    assert requeued() == []


def test_paging_does_not_skip_tasks_that_died_at_the_same_moment(stack: ServersOfTests) -> None:
    tasks = buried(120)
    batches = list(requeue(engine(), Choice(), actor="me", batch=50, limit=110))
    assert after_commit_publisher().wait_until_idle(60)
    assert [len(batch) for batch in batches] == [50, 50, 10]
    assert len({id_ for batch in batches for id_ in batch}) == 110
    assert Counter(statuses(tasks)) == {"QUEUED": 110, "DEAD": 10}


def test_a_page_locked_by_another_operator_does_not_end_the_requeue(stack: ServersOfTests) -> None:
    tasks = sorted(buried(30))
    with engine().begin() as other:
        lock = sql("SELECT FROM ledger.ingest_task WHERE id = ANY(CAST(:ids AS uuid[])) FOR UPDATE")
        other.execute(lock, {"ids": tasks[:10]})
        assert sorted(requeued(batch=10)) == tasks[10:]
    assert sorted(requeued(batch=10)) == tasks[:10]


def test_four_operators_at_once_requeue_each_task_once(stack: ServersOfTests) -> None:
    tasks = buried(400)
    with ThreadPoolExecutor(4) as operators:
        done = [id_ for ids in operators.map(lambda _: requeued(batch=7), range(4)) for id_ in ids]
    assert sorted(done + requeued()) == sorted(tasks)
    assert Counter(id_ for wakeup in work.wakeups() for id_ in wakeup.ids) == dict.fromkeys(tasks, 1)


def test_a_task_that_dies_again_meanwhile_is_not_requeued_for_ever(stack: ServersOfTests) -> None:
    tasks = dead(DIES, DIES)
    seen = []
    for batch in requeue(engine(), Choice(), actor="me", batch=1):
        seen += batch
        deliver(engine(), batch)
        assert after_commit_publisher().wait_until_idle(60)
    assert sorted(seen) == sorted(tasks)
    assert statuses(tasks) == ["DEAD", "DEAD"]


def test_a_requeued_task_that_killed_its_worker_runs_alone(stack: ServersOfTests) -> None:
    (killer,), (other,) = buried(1, error_code="worker_lost"), buried(1, isolated=True)
    requeued()
    assert (work.task(killer)["isolated"], work.task(other)["isolated"]) == (True, False)


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        (Choice(), {"old", "lost", "elsewhere"}),
        (Choice(type="demo.flaky"), {"lost", "elsewhere"}),
        (Choice(queue="ingest"), {"old", "lost"}),
        (Choice(error_code="worker_lost"), {"lost"}),
        (Choice(type="demo.flaky", queue="ingest"), {"lost"}),
        (Choice(ids=[uuid.UUID(int=7)]), set()),
    ],
    ids=["all", "type", "queue", "error code", "both", "ids"],
)
def test_only_the_chosen_tasks_are_requeued(stack: ServersOfTests, choice: Choice, chosen: set[str]) -> None:
    tasks = {
        "old": buried(1, type="another")[0],
        "lost": buried(1, error_code="worker_lost")[0],
        "elsewhere": buried(1, queue="other")[0],
    }
    with engine().connect() as connection:
        assert count(connection, choice).total == len(chosen)
    assert set(requeued(choice)) == {tasks[name] for name in chosen}


def test_since_and_until_choose_by_the_time_of_death(stack: ServersOfTests) -> None:
    old, new = buried(2)
    change([old], "finished_at = finished_at - interval '1 hour'")
    with engine().connect() as connection:
        between = now(connection) - timedelta(minutes=1)
    assert requeued(Choice(until=between)) == [old]
    assert requeued(Choice(since=between)) == [new]


def test_counting_many_different_errors_returns_only_the_largest_groups(stack: ServersOfTests) -> None:
    tasks = buried(300)
    change(tasks, "error_message = 'no ' || id")
    buried(2)
    with engine().connect() as connection:
        found = count(connection, Choice())
    assert (found.total, len(found.groups), found.groups[0].count) == (302, 100, 2)


def test_a_discard_is_sent_to_the_notify_destination(stack: ServersOfTests) -> None:
    (task,) = buried(1, notify="orders", attempt_count=3)
    assert all_of(discard(engine(), Choice(), actor="me@here", reason="cancelled")) == [task]
    assert statuses([task]) == ["DISCARDED"]
    assert work.transitions(task, "to_status, message, actor") == [("DISCARDED", "cancelled", "me@here")]
    ((notice,),) = events("payload", "destination = 'orders'")
    assert (notice["taskId"], notice["status"], notice["attemptCount"]) == (str(task), "DISCARDED", 3)


# the dead-letter queue


@dataclass
class Shown:
    """The dead-letter queue on one broker."""

    app: Celery
    relay: Relay

    def sync(self, *, force: bool = False) -> int:
        """Sync the queue and publish the letters."""
        written = sync(engine(), settings.current(), force=force)
        self.relay.tick()
        return written

    def add(self, task_id: uuid.UUID) -> None:
        """Publish one more letter."""
        letter(task_id)
        self.relay.tick()

    def take(self) -> list[uuid.UUID]:
        """Remove and return all letters."""
        with self.app.connection_for_read() as connection, connection.channel() as channel:
            queue = Queue(DLQ, channel=channel)
            return sorted(uuid.UUID(message.payload[0][0]) for message in iter(lambda: queue.get(no_ack=True), None))


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.guarantee)])
def shown(request: pytest.FixtureRequest, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    """Use the settings of a process with this BROKER_URL: `celeryconfig` reads it only once, at import."""
    url = stack.addresses["BROKER_URL"]
    if request.param == "rabbitmq":
        url = request.getfixturevalue("rabbitmq_vhost").url
    celeryconfig = ModuleType("celeryconfig")
    vars(celeryconfig).update(celery_settings(url))
    monkeypatch.setitem(sys.modules, "celeryconfig", celeryconfig)
    monkeypatch.setenv("BROKER_URL", url)
    settings.current.cache_clear()
    with application(url) as app:
        monkeypatch.setattr(broker, "app", app)
        broker.purge(DLQ)
        relay = Relay.of(settings.current())
        yield Shown(app, relay)
        relay.close()


def letter(task_id: uuid.UUID) -> None:
    with engine().begin() as connection:
        written = sql(
            "INSERT INTO ledger.outbox_event (destination, payload) VALUES (:d, jsonb_build_object('dead', :id))"
        )
        connection.execute(written, {"d": f"celery:{DLQ}", "id": str(task_id)})


def test_a_queue_that_lost_its_letters_is_restored(shown: Shown) -> None:
    tasks = dead(DIES, DIES, DIES)
    shown.relay.tick()
    assert shown.take() == sorted(tasks)
    shown.add(tasks[0])
    assert shown.sync() == 3
    assert shown.take() == sorted(tasks)


def test_a_broker_that_lost_the_letters_is_reported_until_the_prune_tick_has_restored_them(shown: Shown) -> None:
    """As after a restart of the embedded stack, whose broker keeps nothing."""
    dead(DIES, DIES, DIES)
    shown.relay.tick()
    assert list(workers._check_dead_letters(settings.current())) == []
    broker.purge(DLQ)
    (finding,) = workers._check_dead_letters(settings.current())
    assert (finding.level, finding.message) == ("warn", "ingest.dlq has 0, and 3 tasks are DEAD")
    assert ticks.run("prune")["letters"] == 3
    shown.relay.tick()
    assert list(workers._check_dead_letters(settings.current())) == []


def test_letters_of_requeued_tasks_are_removed(shown: Shown) -> None:
    stays, goes = dead(DIES, DIES)
    shown.relay.tick()
    requeued(Choice(ids=[goes]))
    assert shown.sync() == 1
    assert shown.take() == [stays]


def test_a_duplicate_letter_is_removed(shown: Shown) -> None:
    (task,) = dead()
    shown.add(task)
    assert shown.sync() == 1
    assert shown.take() == [task]


def test_the_unpublished_letter_of_a_requeued_task_is_never_published(shown: Shown) -> None:
    stays, goes = dead(DIES, DIES)
    requeued(Choice(ids=[goes]))
    assert shown.sync() == 1
    assert shown.take() == [stays]


def test_a_correct_queue_is_rewritten_only_by_force(shown: Shown) -> None:
    (task,) = dead()
    shown.relay.tick()
    before = events("id", LETTERS)
    assert shown.sync() == 0
    assert events("id", LETTERS) == before
    assert shown.sync(force=True) == 1
    assert shown.take() == [task]


def test_a_letter_that_is_being_published_is_not_written_twice(shown: Shown) -> None:
    dead()
    with engine().begin() as connection:
        connection.execute(
            sql(f"""
            UPDATE ledger.outbox_event
            SET locked_by = 'a relay', locked_at = ledger.ledger_now(), lease_token = gen_random_uuid(),
                lease_until = ledger.ledger_now() + interval '1 minute' WHERE {LETTERS}""")
        )
    assert shown.sync() == 0  # the letter may already be in the queue
    assert shown.sync(force=True) == 0
    assert events("status", LETTERS) == [("NEW",)]


def test_refused_letters_do_not_pile_up(shown: Shown) -> None:
    (task,) = dead()
    with engine().begin() as connection:
        connection.execute(
            sql(f"UPDATE ledger.outbox_event SET status = 'DEAD', last_error = 'refused' WHERE {LETTERS}")
        )
    assert shown.sync() == 0
    assert shown.sync(force=True) == 1  # after the broker was repaired
    assert events("status", LETTERS) == [("SENT",)]
    assert shown.take() == [task]


def test_a_task_that_dies_during_a_rewrite_has_one_letter(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    purge = broker.purge
    (before,) = dead()
    meanwhile: list[uuid.UUID] = []

    def purge_while_one_dies(queue: str) -> int:
        meanwhile.extend(dead())
        return purge(queue)

    monkeypatch.setattr(broker, "purge", purge_while_one_dies)
    assert shown.sync(force=True) == 1
    assert shown.take() == sorted([before, *meanwhile])


def test_two_processes_do_not_rewrite_the_queue_at_once(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    purge = broker.purge
    (task,) = dead()

    def purge_while_another_tries(queue: str) -> int:
        assert sync(engine(), settings.current(), force=True) == 0
        return purge(queue)

    monkeypatch.setattr(broker, "purge", purge_while_another_tries)
    assert shown.sync(force=True) == 1
    assert shown.take() == [task]


def test_no_letter_is_deleted_while_the_broker_is_unreachable(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead()
    before = events("id", LETTERS)
    monkeypatch.setattr(broker, "app", Celery(broker="redis://127.0.0.1:1/0", set_as_current=False))
    with pytest.raises(Unreachable):
        sync(engine(), settings.current(), force=True)
    assert events("id", LETTERS) == before
