"""Celery's signals are sent for tasks of the ledger: once per attempt, with the type as the sender's name."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from billiard.exceptions import WorkerLostError
from celery import signals
from sqlalchemy.orm import Session

import settings
from models.engine import engine
from tasks import Discard, Finish, Permanent, Snooze
from tasks.core.task import Task
from tasks.execution import celery_signals
from tasks.recovery.reclaim import reclaim_leases
from tests.tasks.deliveries import claimed, delivered, handled, inserting, raising, scripted, submitted
from tests.tasks.work import OnPurpose, effects, rows, task

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")

NAMES = ("task_prerun", "task_success", "task_retry", "task_failure", "task_postrun")
Sent = tuple[str, uuid.UUID]


class Receiver:
    """Records the signals of tasks of the ledger, in their order."""

    def __init__(self) -> None:
        self.received: list[tuple[str, dict[str, Any]]] = []

    def about(self, name: str) -> Callable[..., None]:
        def receive(**about: Any) -> None:
            self.received.append((name, about))

        return receive

    @property
    def sent(self) -> list[Sent]:
        return [(name, uuid.UUID(about["task_id"])) for name, about in self.received]

    def only(self, name: str) -> dict[str, Any]:
        (found,) = (about for each, about in self.received if each == name)
        return found


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    functions = {name: receiver.about(name) for name in NAMES}
    for name, function in functions.items():
        getattr(signals, name).connect(function, weak=False)
    yield receiver
    for name, function in functions.items():
        getattr(signals, name).disconnect(function)


@contextmanager
def connected(signal: Any, function: Callable[..., Any], **how: Any) -> Iterator[None]:
    signal.connect(function, weak=False, **how)
    try:
        yield
    finally:
        signal.disconnect(function, **how)


def test_a_success_has_its_result_and_comes_after_the_commit(receiver: Receiver) -> None:
    statuses: list[str] = []

    def look(task_id: str, **_: Any) -> None:
        statuses.append(task(uuid.UUID(task_id))["status"])

    (id_,) = scripted(lambda _task, _db: {"sum": 3})
    with connected(signals.task_success, look):
        delivered([id_])
    assert receiver.sent == [("task_prerun", id_), ("task_postrun", id_), ("task_success", id_)]
    success = receiver.only("task_success")
    assert (success["sender"].name, success["result"]) == ("test.scripted", {"sum": 3})
    assert success["runtime"] > 0
    assert (success["sender"].request.id, success["sender"].request.retries) == (str(id_), 0)
    assert statuses == ["SUCCEEDED"]
    postrun = receiver.only("task_postrun")
    assert (postrun["retval"], postrun["state"], postrun["task"].name) == ({"sum": 3}, "SUCCESS", "test.scripted")
    assert (postrun["args"], postrun["kwargs"]) == ((), {})


def test_each_failed_attempt_is_one_signal_with_the_exception_of_the_handler(receiver: Receiver) -> None:
    (id_,) = scripted(raising(OnPurpose("no")), max_attempts=2)
    delivered([id_])
    assert receiver.sent == [("task_prerun", id_), ("task_postrun", id_), ("task_retry", id_)]
    retry = receiver.only("task_retry")
    assert isinstance(retry["reason"], OnPurpose)
    assert "OnPurpose: no" in retry["einfo"].traceback
    assert receiver.only("task_postrun")["state"] == "RETRY"
    receiver.received.clear()
    with engine().begin() as connection:
        connection.exec_driver_sql("UPDATE celeriac.ingest_task SET next_retry_at = now() - interval '1 s'")
    delivered([id_])
    assert receiver.sent == [("task_prerun", id_), ("task_postrun", id_), ("task_failure", id_)]
    failure = receiver.only("task_failure")
    assert isinstance(failure["exception"], OnPurpose)
    assert (failure["sender"].name, failure["traceback"] is not None) == ("test.scripted", True)
    assert receiver.only("task_postrun")["state"] == "FAILURE"


def test_every_task_of_a_batch_has_signals_of_its_own(receiver: Receiver) -> None:
    ids = submitted(3)
    delivered(ids)
    assert sorted(receiver.sent) == sorted((name, id_) for id_ in ids for name in (NAMES[0], NAMES[1], NAMES[4]))


def test_every_task_of_a_batch_handler_has_signals_of_its_own(receiver: Receiver) -> None:
    def function(tasks: list[Task], _db: Session) -> list[Any]:
        return [each.payload for each in tasks]

    with handled("test.results", function, many=True):
        ids = submitted(3, "test.results", lambda n: n)
        delivered(ids)
    names = [name for name, _ in receiver.received]
    assert names == ["task_prerun"] * 3 + ["task_postrun"] * 3 + ["task_success"] * 3
    for name, value in (("task_postrun", "retval"), ("task_success", "result")):
        assert sorted(about[value] for each, about in receiver.received if each == name) == [0, 1, 2]


def test_a_failure_in_a_batch_is_one_retry_and_each_of_the_others_one_success(receiver: Receiver) -> None:
    """The others are called again, with signals around the second call; what was settled is told once."""
    ids = inserting({1: raising(OnPurpose("no"))}, 3)
    delivered(ids)
    sent = receiver.sent
    assert [each for each in sent if each[0] == "task_retry"] == [("task_retry", ids[1])]
    assert sorted(id_ for name, id_ in sent if name == "task_success") == sorted([ids[0], ids[2]])
    calls = [name for name, _ in sent if name in ("task_prerun", "task_postrun")]
    assert calls == ["task_prerun", "task_postrun"] * 4
    assert effects() == {ids[0]: 1, ids[2]: 1}


def test_a_failure_in_a_batch_handler_is_one_retry_and_one_log_record_and_each_of_the_others_one_success(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole batch fails first; then each of its tasks runs alone."""

    def function(tasks: list[Task], _db: Session) -> None:
        if any(each.payload == 1 for each in tasks):
            raise OnPurpose("no")

    with handled("test.results", function, many=True):
        ids = submitted(3, "test.results", lambda n: n)
        delivered(ids)
    ends = [each for each in receiver.sent if each[0] not in ("task_prerun", "task_postrun")]
    assert sorted(ends) == sorted([("task_success", ids[0]), ("task_retry", ids[1]), ("task_success", ids[2])])
    calls = Counter(each for each in receiver.sent if each not in ends)
    assert calls == {(name, id_): 2 for name in ("task_prerun", "task_postrun") for id_ in ids}
    (record,) = (record for record in caplog.records if record.exc_info)
    assert (record.levelname, getattr(record, "taskId", None)) == ("WARNING", str(ids[1]))


def test_a_handler_outside_a_transaction_is_announced_once_although_finish_calls_its_function_later(
    receiver: Receiver,
) -> None:
    with handled("test.finish", lambda _task: Finish(lambda _db: None, result=7), transactional=False):
        (id_,) = submitted(1, "test.finish")
        delivered([id_])
    assert receiver.sent == [("task_prerun", id_), ("task_postrun", id_), ("task_success", id_)]
    assert receiver.only("task_success")["result"] == 7


def test_a_failure_that_is_returned_and_not_raised_is_announced_like_any_other(receiver: Receiver) -> None:
    (id_,) = scripted(lambda *_: Permanent("no such invoice"))
    delivered([id_])
    assert receiver.sent == [("task_prerun", id_), ("task_postrun", id_), ("task_failure", id_)]
    assert "no such invoice" in receiver.only("task_failure")["einfo"].traceback


@pytest.mark.parametrize(("verdict", "state"), [(Snooze(60), "RETRY"), (Discard("old"), "REVOKED")])
def test_a_task_that_neither_succeeds_nor_fails_has_no_such_signal(
    receiver: Receiver, verdict: Exception, state: str
) -> None:
    (id_,) = scripted(raising(verdict))
    delivered([id_])
    assert receiver.sent == [("task_prerun", id_), ("task_postrun", id_)]
    assert receiver.only("task_postrun")["state"] == state


def test_the_process_that_reclaims_a_task_announces_its_failure(receiver: Receiver) -> None:
    (id_,) = submitted(1, max_attempts=1)
    claimed([id_], holder="lost:1")
    reclaim_leases(engine(), settings.current(), holders=["lost:1"])
    assert receiver.sent == [("task_failure", id_)]
    assert isinstance(receiver.only("task_failure")["exception"], WorkerLostError)


def test_a_receiver_that_raises_does_not_harm_the_task(receiver: Receiver) -> None:
    def fail(**_: Any) -> None:
        raise OnPurpose("a receiver")

    ids = submitted(2)
    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(connected(getattr(signals, name), fail))
        delivered(ids)
    assert rows() == [("SUCCEEDED", 0)] * 2
    assert effects() == dict.fromkeys(ids, 1)


def test_a_receiver_can_ask_for_one_type() -> None:
    seen: list[str] = []

    def receive(sender: Any, **_: Any) -> None:
        seen.append(sender.name)

    with connected(signals.task_success, receive, sender="test.insert"):
        delivered(submitted(1))
        delivered(scripted(lambda *_: None))
    assert seen == ["test.insert"]


def test_nothing_is_made_for_signals_without_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        pytest.fail("a sender was made although no receiver is connected")

    monkeypatch.setattr(celery_signals.Sender, "of", fail)
    assert not any(getattr(signals, name).receivers for name in NAMES)
    delivered([*submitted(2), *scripted(raising(OnPurpose("no")))])
    assert sorted(rows("status")) == [("RETRYING",), ("SUCCEEDED",), ("SUCCEEDED",)]
