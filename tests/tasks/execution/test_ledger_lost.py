"""A lost connection to the ledger runs no committed task again: the lease token tells what was committed."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import settings
from models.engine import engine, make_engine
from models.sql import sql
from tasks.core.task import Task
from tasks.execution.deliver import ingest
from tasks.recovery.reclaim import Reclaimed, reclaim_leases
from tests.outbox.ledger import move
from tests.outbox.publishers.proxy import Proxy
from tests.servers import ServersOfTests
from tests.tasks.deliveries import (
    are_well,
    audits,
    delivered,
    handled,
    inserting,
    leases,
    raising,
    scalar,
    submitted,
    take_away,
    watching,
)
from tests.tasks.lost_workers import later
from tests.tasks.work import OnPurpose, effects, rows, task, transitions, wakeups

Script = Callable[[Task, Any], Any]


class Line(Proxy):
    """A proxy for the ledger that breaks a connection at a given text: before the server gets it, or its answer."""

    def __init__(self, server: str) -> None:
        self._cut_at: bytes | None = None
        self._answer_is_lost = self._must_answer = False
        super().__init__(server)

    def cut_at(self, words: str, *, but_it_arrives: bool) -> None:
        self._cut_at, self._must_answer = words.encode(), but_it_arrives

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            if self._cut_at and self._cut_at in data:
                self._cut_at = None
                if not self._must_answer:
                    return
                self._answer_is_lost = True
            target.sendall(data)

    def _answer(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            if self._answer_is_lost:
                self._answer_is_lost = False
                return
            target.sendall(data)


pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@pytest.fixture
def line(stack: ServersOfTests) -> Iterator[Line]:
    line = Line(settings.current().database_url)
    yield line
    line.close()


@pytest.fixture
def through_the_line(line: Line) -> Iterator[Engine]:
    made = make_engine(line.url)
    yield made
    made.dispose()


def cut(db: Session) -> None:
    """Let the server end the connection of this session; the session does not notice yet."""
    backend = db.execute(sql("SELECT pg_backend_pid()")).scalar_one()
    scalar("SELECT pg_terminate_backend(:pid, 10000)", pid=backend)


def noticed(_task: Task, db: Session) -> None:
    cut(db)
    db.execute(sql("SELECT 1"))


def not_noticed(_task: Task, db: Session) -> None:
    cut(db)


def swallowed(each: Task, db: Session) -> None:
    with suppress(DBAPIError):
        noticed(each, db)


def made_another_error_of(each: Task, db: Session) -> None:
    try:
        noticed(each, db)
    except DBAPIError as error:
        raise RuntimeError("my own words") from error


LOSSES = [noticed, not_noticed, swallowed, made_another_error_of]


def once(script: Script) -> Script:
    done: list[uuid.UUID] = []

    def first_time(each: Task, db: Any) -> None:
        if each.id not in done:
            done.append(each.id)
            script(each, db)

    return first_time


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_that_loses_its_connection_is_not_charged_and_runs_one_by_one(loss: Script) -> None:
    ids = inserting({1: once(loss)}, 3)
    delivered(ids)
    assert rows("status, attempt_count, isolated") == [("RETRYING", 0, True)] * 3
    assert (effects(), leases(), audits()) == ({}, 0, [])
    assert sorted(len(wakeup.ids) for wakeup in wakeups())[:3] == [1, 1, 1]
    delivered(ids)
    assert rows() == [("SUCCEEDED", 0)] * 3
    assert effects() == dict.fromkeys(ids, 1)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_task_that_loses_its_connection_when_alone_is_charged_once(loss: Script) -> None:
    (id_,) = inserting({0: once(loss)}, 1)
    delivered([id_])
    assert rows("status, attempt_count, error_code, isolated") == [("RETRYING", 1, "ledger_lost", False)]
    assert (effects(), leases(), audits()) == ({}, 0, [])


@pytest.mark.parametrize("count", [1, 3])
def test_a_commit_whose_answer_was_lost_is_never_run_again(count: int, line: Line, through_the_line: Engine) -> None:
    ids = inserting({0: lambda *_: line.cut_at("COMMIT", but_it_arrives=True)}, count)
    ingest(through_the_line, ids)
    are_well(ids)
    assert audits() == []
    ingest(through_the_line, ids)
    are_well(ids)


@pytest.mark.parametrize("count", [1, 3])
def test_a_commit_that_never_arrived_leaves_no_effect(count: int, line: Line, through_the_line: Engine) -> None:
    ids = inserting({0: once(lambda *_: line.cut_at("COMMIT", but_it_arrives=False))}, count)
    ingest(through_the_line, ids)
    alone = count == 1
    assert rows("status, attempt_count, isolated") == [("RETRYING", int(alone), not alone)] * count
    assert (effects(), leases(), audits()) == ({}, 0, [])


def test_only_the_task_that_was_running_alone_is_charged_for_a_lost_connection() -> None:
    ids = inserting({0: raising(OnPurpose()), 2: once(noticed)}, 5)
    delivered(ids)
    assert rows("status, attempt_count, isolated") == [
        ("RETRYING", 1, False),
        ("SUCCEEDED", 0, False),
        ("RETRYING", 1, False),
        ("QUEUED", 0, False),
        ("QUEUED", 0, False),
    ]
    assert (effects(), leases()) == ({ids[1]: 1}, 0)
    delivered(ids[3:])
    assert effects() == dict.fromkeys([ids[1], *ids[3:]], 1)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_failure_is_charged_once_although_the_answer_to_its_settling_was_lost(
    arrives: bool, line: Line, through_the_line: Engine
) -> None:
    def fail(_task: Task, _db: Session) -> None:
        line.cut_at("COMMIT", but_it_arrives=arrives)  # the next COMMIT is that of the settling
        raise OnPurpose("on purpose")

    (id_,) = inserting({0: fail}, 1)
    ingest(through_the_line, [id_])
    assert rows("status, attempt_count, error_code") == [("RETRYING", 1, "handler_error")]
    assert [to for _, to in transitions(id_)] == ["QUEUED", "RUNNING", "RETRYING"]
    assert (leases(), audits()) == (0, [])


@pytest.mark.parametrize("arrives", [True, False])
def test_an_effect_outside_the_ledger_is_settled_although_the_connection_was_lost(
    arrives: bool, line: Line, through_the_line: Engine
) -> None:
    """The handler has had its effect, so a lost connection must not make it run again."""
    with handled("test.elsewhere", lambda _task: line.cut_at("COMMIT", but_it_arrives=arrives), transactional=False):
        (id_,) = submitted(1, "test.elsewhere")
        ingest(through_the_line, [id_])
    assert rows() == [("SUCCEEDED", 0)]
    assert (leases(), audits()) == (0, [])


def test_a_task_lost_while_it_was_settled_blocks_the_rest_of_its_key(line: Line, through_the_line: Engine) -> None:
    ran: list[int] = []

    def lose_the_first(each: Task) -> None:
        ran.append(each.payload)
        line.cut_at("COMMIT", but_it_arrives=False)

    def take_away_both(_context: Any) -> None:
        for id_ in ids:
            take_away(id_)

    with handled("test.elsewhere", lose_the_first, transactional=False):
        ids = submitted(2, "test.elsewhere", lambda n: n, partition_key="k")
        with watching(through_the_line, "handle_error", take_away_both):
            ingest(through_the_line, ids)
    assert ran == [0]


def test_an_effect_outside_the_ledger_is_settled_although_all_connections_are_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = make_engine(settings.current().database_url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    taken: list[Connection] = []
    monkeypatch.setattr("tasks.execution.unsettled.logger.warning", lambda *_: taken.pop().close())

    with handled("test.elsewhere", lambda _task: taken.append(small.connect()), transactional=False):
        ingest(small, submitted(1, "test.elsewhere"))
    small.dispose()
    assert (rows(), leases(), taken) == ([("SUCCEEDED", 0)], 0, [])


def test_a_task_is_not_charged_for_a_prepared_statement_that_the_server_has_dropped() -> None:
    def drop(each: Task) -> None:
        if each.payload == "drop":
            with engine().begin() as connection:
                connection.execute(sql("DEALLOCATE ALL"))

    def drop_inside(each: Task, db: Session) -> None:
        if each.payload == "drop":
            db.execute(sql("DEALLOCATE ALL"))

    with handled("test.elsewhere", drop, transactional=False), handled("test.inside", drop_inside):
        for type in ["test.elsewhere", "test.inside"]:
            for payload in ["prepare", "drop"]:
                delivered(submitted(1, type, payload))
    assert (rows(), leases()) == ([("SUCCEEDED", 0)] * 4, 0)


@pytest.mark.parametrize(("count", "found"), [(1, Reclaimed(1, charged=1)), (3, Reclaimed(1, isolated=3))], ids=str)
def test_tasks_that_cannot_be_released_keep_their_lease_until_it_is_reclaimed(
    count: int, found: Reclaimed, line: Line, through_the_line: Engine, ledger: ServersOfTests
) -> None:
    def lose_for_good(_task: Task, _db: Session) -> None:
        line.close()

    ids = inserting({0: once(lose_for_good)}, count)
    ingest(through_the_line, ids)
    assert set(rows("status, lease_token IS NULL")) == {("RUNNING", False)}
    assert leases() == 1
    move(ledger, settings.current().ingest_lease_seconds + 1)
    reclaim_leases(engine(), settings.current())  # reclaim has not run for long, so it only extends the leases
    later(ledger, settings.current().ingest_lease_seconds + 1)
    assert reclaim_leases(engine(), settings.current()) == found
    assert effects() == {}


def test_after_a_lost_connection_the_next_message_runs_on_a_new_one() -> None:
    ids = inserting({0: once(noticed)}, 1)
    delivered(ids)
    good = submitted(5)
    delivered(good)
    assert {task(id_)["status"] for id_ in good} == {"SUCCEEDED"}
