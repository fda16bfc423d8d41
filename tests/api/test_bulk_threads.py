"""Any API process does the bulk actions that wait, and none holds up another or the end of its process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine

import settings
from api import bulk_threads
from api.app import app
from api.bulk_threads import BulkThreads, look_for_bulk_actions
from models.engine import engine
from tasks.operations import bulk_actions, bulk_run
from tasks.operations.bulk_run import BulkClaim
from tests.servers import ServersOfTests, wait_until
from tests.tasks.bulk import ordered, row
from tests.tasks.command_line import buried, statuses

UNREACHABLE = "postgresql://127.0.0.1:1/x"
SLOW = 0.02  # tasks per second: one task, and the next one in 50 seconds
Start = Callable[[], BulkThreads]


@pytest.fixture
def start(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts the threads of an API process, which look often."""
    monkeypatch.setattr(bulk_threads, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(bulk_run, "SIGN_SECONDS", 0.05)
    started: list[BulkThreads] = []

    def begin() -> BulkThreads:
        started.append(BulkThreads())
        started[-1].start()
        return started[-1]

    yield begin
    for each in started:
        asyncio.run(each.stop())


def test_an_action_whose_api_process_died_before_it_began_is_done_by_another_one(start: Start) -> None:
    ids, id_ = buried(5), ordered()
    start()
    wait_until(lambda: row(id_).state == "done", "the action is done")
    assert statuses(ids) == ["QUEUED"] * 5


def test_an_action_begins_at_once_when_the_process_is_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_threads, "LOOK_SECONDS", 600)
    start()
    id_ = ordered()
    look_for_bulk_actions()
    wait_until(lambda: row(id_).state == "done", "the action is done")


@pytest.mark.guarantee
def test_two_processes_change_each_task_once(start: Start) -> None:
    buried(50)
    first, second = ordered(), ordered()
    start(), start()
    wait_until(lambda: {row(first).state, row(second).state} == {"done"}, "both are done")
    assert row(first).changed + row(second).changed == 50


def test_a_slow_action_does_not_hold_up_the_next_one(start: Start) -> None:
    buried(3)
    slow = ordered(per_second=SLOW)
    start()
    wait_until(lambda: row(slow).changed == 1, "the slow one has begun")
    fast = ordered()
    wait_until(lambda: row(fast).state == "done", "the fast one is done")
    assert (row(slow).state, row(fast).changed) == ("running", 2)


def test_more_actions_than_threads_are_done_one_after_the_other(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_threads, "MOST_AT_ONCE", 1)
    buried(2)
    slow, next_one = ordered(per_second=SLOW), ordered()
    start()
    wait_until(lambda: row(slow).changed == 1, "the slow one has begun")
    assert row(next_one).state == "waiting"
    monkeypatch.setattr(bulk_threads, "LOOK_SECONDS", 600)
    bulk_actions.stop(engine(), slow, actor="ann")
    wait_until(lambda: row(next_one).state == "done", "the next one is done")


@pytest.mark.guarantee
def test_the_end_of_the_api_process_stops_its_actions_within_seconds_and_they_can_be_continued(start: Start) -> None:
    ids = buried(3)
    id_ = ordered(per_second=SLOW)
    threads = start()
    wait_until(lambda: row(id_).changed == 1, "it has begun")
    began_at = time.monotonic()
    asyncio.run(threads.stop())
    assert time.monotonic() - began_at < bulk_threads.STOP_SECONDS
    assert (row(id_).state, row(id_).changed) == ("stopped", 1)
    assert row(id_).message == "Stopped because the API process that did it was stopped."
    assert sorted(statuses(ids)) == ["DEAD", "DEAD", "QUEUED"]
    bulk_actions.go_on(engine(), id_, actor="ann")
    start()
    wait_until(lambda: row(id_).state == "running", "it goes on")


def test_an_outage_of_the_ledger_is_logged_once_and_the_actions_are_done_afterwards(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[Engine] = []
    claim_next = bulk_run.claim_next

    def look(engine: Engine) -> BulkClaim | None:
        looks.append(engine)
        return claim_next(engine)

    monkeypatch.setattr(bulk_threads, "claim_next", look)
    id_ = ordered()
    with monkeypatch.context() as there:
        there.setenv("DATABASE_URL", UNREACHABLE)
        settings.current.cache_clear()
        start()
        wait_until(lambda: len(looks) >= 3, "it has looked several times")
    settings.current.cache_clear()
    wait_until(lambda: row(id_).state == "done", "the action is done")
    assert caplog.text.count("this process waits for it") == 1
    assert "The ledger answers again" in caplog.text


def test_the_api_does_bulk_actions_for_as_long_as_it_runs(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_threads, "LOOK_SECONDS", 0.05)
    id_ = ordered()
    with TestClient(app):
        wait_until(lambda: row(id_).state == "done", "the action is done")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bulk-action")]
