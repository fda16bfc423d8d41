"""Server-sent events of tasks: every change once and in order, for many clients with few statements."""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
from contextlib import AsyncExitStack
from typing import Any

import pytest

import settings
from api import event_streams, http_protocol, task_events, task_feed
from api.tokens import Scope
from models.engine import engine
from receipts.save import save_any_shard
from tasks.execution.deliver import deliver
from tasks.operations import new_transitions
from tests.api.callers import FLAKY, Caller, Callers, expect_error, make_token
from tests.api.event_clients import EventClient, request
from tests.api.server import Server
from tests.servers import ServersOfTests, wait_until
from tests.tasks.command_line import DIES
from tests.tasks.deliveries import scalar, statements, submitted, watching
from tests.tasks.work import transitions

CLIENTS = 200


@pytest.fixture
def caller(callers: Callers) -> Caller:
    return callers(Scope.TASKS_SUBMIT, Scope.TASKS_READ, name="ci")


def read(caller: Caller, task_id: Any, **headers: str) -> list[tuple[int, str]]:
    """Return id and status of each event of a stream that ends."""
    answer = caller.get(f"/api/tasks/{task_id}/events", headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = [dict(line.split(": ", 1) for line in event.splitlines()) for event in answer.text.split("\n\n") if event]
    return [(int(event["id"]), event["data"].partition('"toStatus":"')[2].partition('"')[0]) for event in events]


def run_all(ids: list[Any]) -> None:
    """Deliver until all have succeeded. If the tasks are slow, `deliver` leaves most of them to other workers."""
    while scalar("SELECT count(*) FROM ledger.ingest_task WHERE status <> 'SUCCEEDED'"):
        deliver(engine(), ids)


def watchers() -> int:
    return sum(len(feed.watchers) for feed in list(task_feed._by_loop.values()))


def test_the_history_of_a_task_is_sent_and_the_stream_ends_with_its_final_status(caller: Caller) -> None:
    id_ = caller.submit().json()["taskId"]
    deliver(engine(), [id_])
    found = read(caller, id_)
    assert [status for _, status in found] == ["QUEUED", "RUNNING", "SUCCEEDED"]
    history = caller.get(f"/api/tasks/{id_}/transitions").json()["transitions"]
    assert [each for each, _ in found] == [each["id"] for each in history]


def test_a_client_that_reconnects_gets_what_it_missed_and_then_nothing_more(caller: Caller) -> None:
    id_ = caller.submit().json()["taskId"]
    deliver(engine(), [id_])
    (first, _), _, (last, _) = read(caller, id_)
    rest = read(caller, id_, **{"Last-Event-ID": str(first)})
    assert [status for _, status in rest] == ["RUNNING", "SUCCEEDED"]
    over = caller.get(f"/api/tasks/{id_}/events", headers={"Last-Event-ID": str(last)})
    assert (over.status_code, over.text) == (204, "")
    for bad in ("x", "-1", "1.5", "9" * 30, "²"):
        headers = {"Last-Event-ID": bad.encode()}
        expect_error(caller.get(f"/api/tasks/{id_}/events", headers=headers), 400, "misuse")


def test_the_changes_of_a_requeued_task_are_sent_beyond_its_first_end(caller: Caller) -> None:
    id_ = caller.submit(DIES).json()["taskId"]
    deliver(engine(), [id_])
    caller.post(f"/api/tasks/{id_}/retry")
    deliver(engine(), [id_])
    assert [status for _, status in read(caller, id_)][2:] == ["DEAD", "QUEUED", "RUNNING", "DEAD"]


def test_a_stream_shows_no_details_and_only_tasks_that_the_token_may_see(callers: Callers, caller: Caller) -> None:
    id_ = caller.submit(DIES).json()["taskId"]
    deliver(engine(), [id_])
    own, all_ = caller.get(f"/api/tasks/{id_}/events"), callers(Scope.OPERATE).get(f"/api/tasks/{id_}/events")
    assert ("it will never work" in own.text, "it will never work" in all_.text) == (False, True)
    expect_error(callers(Scope.TASKS_READ).get(f"/api/tasks/{id_}/events"), 404, "unknown_task")
    expect_error(caller.get(f"/api/tasks/{uuid.uuid4()}/events"), 404, "unknown_task")


def test_a_task_that_is_accepted_and_not_saved_can_be_followed(
    ledger: ServersOfTests, callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "true")
    settings.current.cache_clear()
    caller = callers()
    id_ = caller.post("/api/tasks?receipt=accepted", json={"type": FLAKY}).json()["taskId"]

    def save_and_run() -> None:
        wait_until(watchers, "a client follows the task")
        save_any_shard(10, until_idle=True)
        deliver(engine(), [id_])

    worker = threading.Thread(target=save_and_run)
    worker.start()
    assert [status for _, status in read(caller, id_)] == ["QUEUED", "RUNNING", "SUCCEEDED"]
    worker.join()


# real connections


def test_two_hundred_clients_follow_their_tasks_with_the_statements_of_one(
    ledger: ServersOfTests, server: Server
) -> None:
    """Each client gets each change of its task, in order. Clients that wait send no statements of their own."""
    token = make_token("all", Scope.TASKS_READ_ALL)
    ids = submitted(CLIENTS // 2)
    sent: list[str] = []  # by the API; the worker of this test runs in another thread

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if threading.current_thread().name.startswith("ledger-"):
            sent.append(statement)

    async def follow() -> list[EventClient]:
        async with AsyncExitStack() as opened:
            # One after the other: on a busy machine, 200 tokens at once could not be checked within the deadline.
            clients = [await opened.enter_async_context(EventClient.open(server.port, token, id_)) for id_ in ids * 2]
            await asyncio.gather(*(client.read(until="QUEUED") for client in clients))
            with watching(engine(), "before_cursor_execute", note):
                await asyncio.to_thread(run_all, ids)
                await asyncio.gather(*(client.read() for client in clients))
        reading = [each for each in sent if "AS watched(task_id, after)" in each]
        assert 0 < len(reading) < CLIENTS / 2, "the clients share the statements"
        assert len(sent) == len(reading), "waiting clients send no other statements"
        return clients

    for client in asyncio.run(follow()):
        history = transitions(client.events[0]["taskId"], "id, to_status")
        assert list(zip(client.ids, client.statuses, strict=True)) == history
        assert [status for _, status in history[:2] + history[-1:]] == ["QUEUED", "RUNNING", "SUCCEEDED"]
    wait_until(lambda: watchers() == 0, "no watcher is left")


def test_a_silent_stream_has_comments_and_ends_when_its_time_is_over(
    ledger: ServersOfTests, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "COMMENT_SECONDS", 0.0)
    monkeypatch.setattr(task_events, "LOOK_SECONDS", 0.05)
    (id_,) = submitted(1)
    token = make_token("all", Scope.TASKS_READ_ALL)

    async def follow(*, comments: int | None = None) -> EventClient:
        async with EventClient.open(server.port, token, id_) as client:
            await client.read(comments=comments)
            return client

    assert asyncio.run(follow(comments=2)).statuses == ["QUEUED"]
    monkeypatch.setattr(task_events, "LONGEST_SECONDS", 0.2)
    assert asyncio.run(follow()).statuses == ["QUEUED"]


def test_a_server_that_stops_ends_its_streams(ledger: ServersOfTests, server: Server) -> None:
    (id_,) = submitted(1)
    token = make_token("all", Scope.TASKS_READ_ALL)

    async def follow() -> list[str]:
        async with EventClient.open(server.port, token, id_) as client:
            await client.read(until="QUEUED")
            stopping = asyncio.create_task(asyncio.to_thread(server.stop))
            found = await client.read()
        await stopping
        return found

    assert asyncio.run(follow()) == ["QUEUED"]
    assert not server.thread.is_alive()


def test_a_client_that_leaves_is_forgotten(ledger: ServersOfTests, server: Server) -> None:
    (id_,) = submitted(1)
    token = make_token("all", Scope.TASKS_READ_ALL)

    async def leave() -> None:
        async with EventClient.open(server.port, token, id_) as client:
            await client.read(until="QUEUED")
            assert watchers() == 1

    asyncio.run(leave())
    wait_until(lambda: watchers() == 0, "the watcher is gone")


def test_streams_continue_after_an_outage_of_the_ledger(
    ledger: ServersOfTests, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (id_,) = submitted(1)
    token = make_token("all", Scope.TASKS_READ_ALL)
    failed = threading.Event()
    reads = task_feed._read_since

    def fail(_positions: Any) -> Any:
        failed.set()
        raise ConnectionError("the ledger is unreachable")

    async def follow() -> list[str]:
        async with EventClient.open(server.port, token, id_) as client:
            await client.read(until="QUEUED")
            monkeypatch.setattr(task_feed, "_read_since", fail)
            await asyncio.to_thread(failed.wait, 20)
            await asyncio.to_thread(deliver, engine(), [id_])
            monkeypatch.setattr(task_feed, "_read_since", reads)
            return await client.read()

    assert asyncio.run(follow()) == ["QUEUED", "RUNNING", "SUCCEEDED"]


# slow clients


def test_a_watcher_that_is_not_read_holds_one_page_and_gets_the_rest_later(ledger: ServersOfTests) -> None:
    (id_,) = submitted(1)
    page = new_transitions.MOST_PER_TASK
    _insert_transitions(id_, 2 * page)

    async def follow() -> list[int]:
        feed, watcher = task_feed.TaskFeed(), task_feed.Watcher(id_, 0)
        feed.watchers.add(watcher)
        found = []
        for expected in (page, page, 1):
            assert await feed._read()
            with statements() as sent:
                assert not await feed._read()
            assert sent == [], "it is not asked for while it has not been read"
            taken = await watcher.take(0)
            assert len(taken) == expected
            found += taken
        return [each.id for each in found]

    ids = asyncio.run(follow())
    assert ids == sorted(set(ids))


def test_a_client_that_does_not_read_its_answer_is_cut_off(
    ledger: ServersOfTests, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "UNREAD_SECONDS", 0.2)
    (id_,) = submitted(1)
    _insert_transitions(id_, new_transitions.MOST_PER_TASK, message="x" * 200_000)  # more than the buffers can take
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", server.port))
        line.sendall(request(make_token("ops", Scope.OPERATE), id_))
        wait_until(watchers, "the stream has begun")
        wait_until(lambda: watchers() == 0, "the connection was cut")


def _insert_transitions(task_id: uuid.UUID, count: int, message: str | None = None) -> None:
    """Add to the history of a task, as if it had been released and claimed again and again."""
    scalar(
        """WITH inserted AS (
            INSERT INTO ledger.ingest_task_transition (task_id, from_status, to_status, attempt_count, message, actor)
            SELECT :id, 'QUEUED', 'RUNNING', 0, :message, 'test' FROM generate_series(1, :n) RETURNING id)
        SELECT count(*) FROM inserted""",
        id=task_id,
        n=count,
        message=message,
    )
