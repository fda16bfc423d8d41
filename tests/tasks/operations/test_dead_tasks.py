"""Dead letters: nobody's work on the same tasks makes one lost or twice, and the queue shows what is DEAD."""

from __future__ import annotations

import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from kombu import Queue

import settings
from models.clock import now
from models.engine import engine
from models.errors import Unreachable
from models.sql import sql
from outbox.after_commit_publisher import submitter
from outbox.relay import Relay
from tasks import broker
from tasks.execution.deliver import ingest
from tasks.operations.dead_letter_queue import sync
from tasks.operations.dead_tasks import Choice, count, discard, requeue
from tests.outbox.ledger import rows as events
from tests.servers import ServersOfTests
from tests.tasks import work
from tests.tasks.celery_settings import application, celery_settings
from tests.tasks.door import DIES, buried, change, dead, statuses

DLQ = "ingest.dlq"
LETTERS = f"destination = 'celery:{DLQ}'"


def all_of(batches: Iterator[list[uuid.UUID]]) -> list[uuid.UUID]:
    return [id_ for batch in batches for id_ in batch]


def requeued(choice: Choice | None = None, **how: Any) -> list[uuid.UUID]:
    done = all_of(requeue(engine(), choice or Choice(), actor="me@here", **how))
    assert submitter().flush(60)
    return done


# what an operator does with dead tasks


def test_a_requeued_task_starts_again_and_its_history_stays(stack: ServersOfTests) -> None:
    (task,) = dead()
    assert requeued(reason="mended") == [task]
    row = work.task(task)
    assert (row["status"], row["attempt_count"], row["finished_at"]) == ("QUEUED", 0, None)
    assert work.transitions(task)[-2:] == [("RUNNING", "DEAD"), ("DEAD", "QUEUED")]
    assert work.transitions(task, "message, actor")[-1] == ("mended", "me@here")
    assert work.wakeups()[-1].ids == [task]
    assert requeued() == []


def test_tasks_that_died_at_the_same_moment_are_all_requeued_page_by_page(stack: ServersOfTests) -> None:
    tasks = buried(120)
    batches = list(requeue(engine(), Choice(), actor="me", batch=50, limit=110))
    assert submitter().flush(60)
    assert [len(batch) for batch in batches] == [50, 50, 10]
    assert len({id_ for batch in batches for id_ in batch}) == 110
    assert Counter(statuses(tasks)) == {"QUEUED": 110, "DEAD": 10}


def test_a_page_in_somebody_elses_hands_does_not_end_the_way_through_the_others(stack: ServersOfTests) -> None:
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


def test_a_task_that_dies_again_meanwhile_is_not_brought_back_for_ever(stack: ServersOfTests) -> None:
    tasks = dead(DIES, DIES)
    seen = []
    for batch in requeue(engine(), Choice(), actor="me", batch=1):
        seen += batch
        ingest(engine(), batch)
        assert submitter().flush(60)
    assert sorted(seen) == sorted(tasks)
    assert statuses(tasks) == ["DEAD", "DEAD"]


def test_what_killed_its_worker_runs_alone_when_it_is_requeued(stack: ServersOfTests) -> None:
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
def test_only_what_is_chosen_is_requeued(stack: ServersOfTests, choice: Choice, chosen: set[str]) -> None:
    tasks = {
        "old": buried(1, type="another")[0],
        "lost": buried(1, error_code="worker_lost")[0],
        "elsewhere": buried(1, queue="other")[0],
    }
    with engine().connect() as connection:
        assert count(connection, choice).total == len(chosen)
    assert set(requeued(choice)) == {tasks[name] for name in chosen}


def test_dead_tasks_are_chosen_by_when_they_died(stack: ServersOfTests) -> None:
    old, new = buried(2)
    change([old], "finished_at = finished_at - interval '1 hour'")
    with engine().connect() as connection:
        between = now(connection) - timedelta(minutes=1)
    assert requeued(Choice(until=between)) == [old]
    assert requeued(Choice(since=between)) == [new]


def test_many_different_errors_are_counted_in_a_short_answer(stack: ServersOfTests) -> None:
    tasks = buried(300)
    change(tasks, "error_message = 'no ' || id")
    buried(2)
    with engine().connect() as connection:
        found = count(connection, Choice())
    assert (found.total, len(found.groups), found.groups[0].count) == (302, 100, 2)


def test_whoever_asked_to_be_notified_hears_of_a_discard(stack: ServersOfTests) -> None:
    (task,) = buried(1, notify="orders", attempt_count=3)
    assert all_of(discard(engine(), Choice(), actor="me@here", reason="cancelled")) == [task]
    assert statuses([task]) == ["DISCARDED"]
    assert work.transitions(task, "to_status, message, actor") == [("DISCARDED", "cancelled", "me@here")]
    ((told,),) = events("payload", "destination = 'orders'")
    assert (told["taskId"], told["status"], told["attemptCount"]) == (str(task), "DISCARDED", 3)


# the queue that shows them


@dataclass
class Shown:
    """The queue of dead letters on one broker."""

    app: Celery
    relay: Relay

    def sync(self, purge: Callable[[str], int] = broker.purge, *, force: bool = False) -> int:
        """And publish what is to be published."""
        written = sync(engine(), settings.current(), depths=broker.depths, purge=purge, force=force)
        self.relay.tick()
        return written

    def add(self, task_id: uuid.UUID) -> None:
        """One letter more."""
        letter(task_id)
        self.relay.tick()

    def take(self) -> list[uuid.UUID]:
        """All letters, which are gone then."""
        with self.app.connection_for_read() as connection, connection.channel() as channel:
            queue = Queue(DLQ, channel=channel)
            return sorted(uuid.UUID(message.payload[0][0]) for message in iter(lambda: queue.get(no_ack=True), None))


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.guarantee)])
def shown(request: pytest.FixtureRequest, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    """With the settings of a process whose BROKER_URL it is: `celeryconfig` reads that once, when it is imported."""
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


def test_a_queue_that_lost_its_letters_gets_them_back(shown: Shown) -> None:
    tasks = dead(DIES, DIES, DIES)
    shown.relay.tick()
    assert shown.take() == sorted(tasks)
    shown.add(tasks[0])
    assert shown.sync() == 3
    assert shown.take() == sorted(tasks)


def test_letters_of_tasks_that_are_not_dead_any_more_go_away(shown: Shown) -> None:
    stays, goes = dead(DIES, DIES)
    shown.relay.tick()
    requeued(Choice(ids=[goes]))
    assert shown.sync() == 1
    assert shown.take() == [stays]


def test_letters_written_twice_are_there_once_again(shown: Shown) -> None:
    (task,) = dead()
    shown.add(task)
    assert shown.sync() == 1
    assert shown.take() == [task]


def test_the_unpublished_letter_of_a_requeued_task_is_never_published(shown: Shown) -> None:
    stays, goes = dead(DIES, DIES)
    requeued(Choice(ids=[goes]))
    assert shown.sync() == 1
    assert shown.take() == [stays]


def test_a_queue_that_is_right_is_left_alone_unless_somebody_insists(shown: Shown) -> None:
    (task,) = dead()
    shown.relay.tick()
    before = events("id", LETTERS)
    assert shown.sync() == 0
    assert events("id", LETTERS) == before
    assert shown.sync(force=True) == 1
    assert shown.take() == [task]


def test_a_letter_that_is_just_leaving_is_neither_missed_nor_written_again(shown: Shown) -> None:
    dead()
    with engine().begin() as connection:
        connection.execute(
            sql(f"""
            UPDATE ledger.outbox_event SET locked_by = 'a relay', locked_at = ledger.ledger_now(), lease_token = gen_random_uuid(),
                                    lease_until = ledger.ledger_now() + interval '1 minute' WHERE {LETTERS}""")
        )
    assert shown.sync() == 0  # it may be in the queue, or not yet
    assert shown.sync(force=True) == 0
    assert events("status", LETTERS) == [("NEW",)]


def test_letters_that_were_refused_are_not_written_again_and_again(shown: Shown) -> None:
    (task,) = dead()
    with engine().begin() as connection:
        connection.execute(
            sql(f"UPDATE ledger.outbox_event SET status = 'DEAD', last_error = 'refused' WHERE {LETTERS}")
        )
    assert shown.sync() == 0
    assert shown.sync(force=True) == 1  # somebody has mended it
    assert events("status", LETTERS) == [("SENT",)]
    assert shown.take() == [task]


def test_a_task_that_dies_while_the_queue_is_written_anew_is_in_it_once(shown: Shown) -> None:
    (before,) = dead()
    meanwhile: list[uuid.UUID] = []

    def purge_while_one_dies(queue: str) -> int:
        meanwhile.extend(dead())
        return broker.purge(queue)

    assert shown.sync(purge_while_one_dies, force=True) == 1
    assert shown.take() == sorted([before, *meanwhile])


def test_only_one_writes_the_queue_anew_at_a_time(shown: Shown) -> None:
    (task,) = dead()

    def purge_while_another_tries(queue: str) -> int:
        assert sync(engine(), settings.current(), depths=broker.depths, purge=broker.purge, force=True) == 0
        return broker.purge(queue)

    assert shown.sync(purge_while_another_tries, force=True) == 1
    assert shown.take() == [task]


def test_nothing_is_forgotten_while_the_broker_is_away(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    dead()
    before = events("id", LETTERS)
    monkeypatch.setattr(broker, "app", Celery(broker="redis://127.0.0.1:1/0", set_as_current=False))
    with pytest.raises(Unreachable):
        sync(engine(), settings.current(), depths=broker.depths, purge=broker.purge, force=True)
    assert events("id", LETTERS) == before
