"""The overview's stream: what changed, once a second, with the statements of one browser for all of them."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from api import tokens
from api.tokens import Scope
from console import overview, overview_feed
from console.overview_feed import OverviewFeed
from console.overview_figures import read_figures
from models.engine import engine
from models.errors import Unreachable
from tasks.operations.inserted_rows import Inserted
from tests.api.callers import make_token
from tests.api.server import Server
from tests.console.visits import figures, logged_in, words
from tests.servers import wait_until
from tests.tasks.command_line import submitted

BROWSERS = 20


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "SEND_SECONDS", 0.2)
    monkeypatch.setattr(overview_feed, "READ_SECONDS", 0.2)


@dataclass
class Stream:
    """An open stream of one browser."""

    response: http.client.HTTPResponse

    def next(self) -> tuple[str, dict[str, str]]:
        """Return the name and the data of the next event; the name is `end` if there is none."""
        name, data = "message", {}
        while line := self.response.readline().decode().rstrip("\n"):
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                data = json.loads(value)
        return (name, data) if data or name != "message" else ("end", {})

    def until(self, text: str, *, part: str) -> str:
        """Return this part as soon as it has the text."""
        for _ in range(100):
            name, data = self.next()
            assert name == "message"
            if text in words(data.get(part, "")):
                return data[part]
        raise AssertionError(f"{part} never had {text!r}")


@contextmanager
def following(server: Server, session: str, period: str = "15m") -> Iterator[Stream]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    headers = {"Cookie": f"celeriac_console_{server.port}={session}"}
    connection.request("GET", f"/console/events?period={period}", headers=headers)
    response = connection.getresponse()
    assert (response.status, response.getheader("content-type")) == (200, "text/event-stream; charset=utf-8")
    try:
        yield Stream(response)
    finally:
        response.close()
        connection.close()


def session_of(name: str = "ann", *scopes: str) -> str:
    cookies = logged_in(make_token(name, *(scopes or (Scope.OPERATE,)))).cookies
    return next(value for key, value in cookies.items() if value and "form" not in key)


def feed() -> OverviewFeed:
    """Return the feed of the server: the one that has streams, or had some."""
    return max(overview_feed._by_loop.values(), key=lambda each: (each.streams, each.reads))


def test_first_all_parts_are_sent_and_then_those_that_changed(server: Server) -> None:
    with following(server, session_of()) as stream:
        name, data = stream.next()
        assert (name, set(data)) == ("message", set(overview.PARTS))
        submitted({})
        assert figures(stream.until("1 may start now", part="pipeline"))["QUEUED"] == "1"
        _, data = stream.next()
        assert "history" not in data, "the charts have not changed"


def test_all_browsers_share_the_reads_of_one(server: Server) -> None:
    session = session_of()
    with ExitStack() as opened:
        streams = [opened.enter_context(following(server, session)) for _ in range(BROWSERS)]
        for stream in streams:
            stream.next()
        assert feed().streams == BROWSERS
        before, began_at = feed().reads, time.monotonic()
        for stream in 2 * streams:
            stream.next()
        reads, longest = feed().reads - before, (time.monotonic() - began_at) / 0.2
        assert 0 < reads <= longest + 1, f"{reads} reads for {2 * BROWSERS} events"


def test_a_stream_without_a_session_sends_the_browser_to_the_login(server: Server) -> None:
    for session in ("", "A" * 43, session_of("submitter", Scope.TASKS_SUBMIT)):
        with following(server, session) as stream:
            assert [stream.next()[0], stream.next()[0]] == ["leave", "end"]


def test_a_revoked_token_ends_its_streams_and_no_others(server: Server) -> None:
    with following(server, session_of("ann")) as of_ann, following(server, session_of("bob")) as of_bob:
        assert (of_ann.next()[0], of_bob.next()[0]) == ("message", "message")
        with engine().begin() as connection:
            tokens.revoke(connection, "ann")
        names = iter(lambda: of_ann.next()[0], "end")
        assert "leave" in list(names)
        assert of_bob.next()[0] == "message"


def test_while_the_ledger_does_not_answer_the_last_figures_stay_and_say_so(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = read_figures

    def fail() -> Any:
        raise Unreachable("PostgreSQL at db.internal is unreachable.")

    submitted({})
    with following(server, session_of()) as stream:
        stream.until("1 may start now", part="pipeline")
        monkeypatch.setattr(overview_feed, "read_figures", fail)
        told = words(stream.until("does not answer", part="state"))
        assert "This is how it was at" in told
        assert "db.internal" not in told
        wait_until(lambda: feed().reads > 4, "it has failed more than once")
        monkeypatch.setattr(overview_feed, "read_figures", read)
        assert "does not answer" not in words(stream.until("UTC", part="state"))
    lines = [each for each in caplog.records if getattr(each, "event", "") == "overview_not_read"]
    assert len(lines) == 1, "one line for each outage"


def test_a_browser_that_leaves_is_forgotten_and_nothing_is_read_for_it(server: Server) -> None:
    with following(server, session_of()) as stream:
        stream.next()
        assert feed().streams == 1
    wait_until(lambda: feed().streams == 0, "the stream is forgotten")
    before = feed().reads
    time.sleep(0.5)
    assert feed().reads == before


def test_a_server_that_stops_ends_its_streams(server: Server) -> None:
    with following(server, session_of()) as stream:
        stream.next()
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        list(iter(lambda: stream.next()[0], "end"))
        stopping.join(10)
        assert not stopping.is_alive()


def test_a_stream_ends_after_its_time_so_that_the_browser_connects_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "LONGEST_SECONDS", 0.5)
    with following(server, session_of()) as stream:
        names = list(iter(lambda: stream.next()[0], "end"))
        assert set(names) == {"message"}


def test_new_tasks_per_second_are_known_after_two_reads() -> None:
    counted = overview_feed.OverviewFeed()
    now = [100.0]
    with pytest.MonkeyPatch.context() as here:
        here.setattr(overview_feed, "time", SimpleNamespace(monotonic=lambda: now[0]))
        seen = []
        for at, tasks in ((100.0, 1000), (101.0, 1030), (110.0, 1130), (160.5, 1735), (221.0, 1735), (222.0, 5)):
            now[0] = at
            seen.append(counted._arrivals(Inserted(tasks, 0)).tasks)
    assert seen[0] is None
    assert seen[1:4] == [30.0, 13.0, pytest.approx(735 / 60.5)]
    assert seen[4] == pytest.approx(0.0)
    assert seen[5] is None, "PostgreSQL began to count again"
