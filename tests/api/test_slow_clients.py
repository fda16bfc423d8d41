"""Slow clients, and the order of frames: no connection delays another one, and nothing is lost or overtakes."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

from api import chat, chat_connection, receiving, websocket_protocol
from api.chat_connection import ChatConnection
from api.tokens import Scope
from receipts import frames, outgoing
from receipts.chat_messages import LONGEST_BODY, ChatMessage
from receipts.receipt import Receipt
from receipts.save import save_any_shard
from tests.api.callers import make_token
from tests.api.chat_clients import SECONDS, ChatClient, connections, distinct, ids, read_all
from tests.api.server import Server
from tests.servers import wait_until

NEVER = 3600.0
LARGE = "x" * LONGEST_BODY


@pytest.fixture
def without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not read the ledger every few seconds, so that a test sees which event made a connection read it."""
    monkeypatch.setattr(chat_connection, "SYNC_SECONDS", NEVER)


# slow clients


def slow_client(port: int, token: str, **options: Any) -> Any:
    """Connect with a small buffer. Nothing is read before the test does."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    line.connect(("127.0.0.1", port))
    return ChatClient.open(port, token, sock=line, max_queue=1, ping_interval=None, close_timeout=0.2, **options)


def is_stuck(connection: ChatConnection) -> bool:
    """Return True if the queue of a connection is full, and stays so for a while."""
    first = list(connection._outgoing._waiting)[:1]
    is_full = bool(first) and not connection._outgoing.has_room_for(first[0].frame)
    time.sleep(0.2)
    return is_full and [id(each) for each in list(connection._outgoing._waiting)[:1]] == [id(each) for each in first]


@pytest.mark.guarantee
def test_a_slow_client_is_closed_and_gets_everything_after_it_reconnects_with_its_cursor(
    server: Server,
    without_sync: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_connection, "CLOSE_SECONDS", float(SECONDS))
    bobs = make_token("bob", Scope.CHAT)
    sent: list[str] = []
    with ExitStack() as opened:
        bob = opened.enter_context(slow_client(server.port, bobs))
        bob.read_until_cursor()
        ann = opened.enter_context(ChatClient.open(server.port, make_token("ann", Scope.CHAT)))
        cid = opened.enter_context(ChatClient.open(server.port, make_token("cid", Scope.CHAT)))
        cid.read_until_cursor()
        for number in map(str, itertools.count()):
            ann.send("bob", number, LARGE)
            ann.expect_ack("saved", number)
            sent.append(number)
            ann.send("cid", f"cid-{number}")
            ann.expect_ack("saved", f"cid-{number}")
            assert cid.read()["clientMsgId"] == f"cid-{number}", "a slow client must not delay another one"
            if connections("bob")[0]._closing.done():
                break
            assert len(sent) < 1000
        found, code = read_all(bob)
        assert code == 1013
        assert found == sent[: len(found)]
        assert len(found) < len(sent)
        ann.send("bob", "afterwards")
        sent.append("afterwards")
        ann.expect_ack("saved", "afterwards")
    with ChatClient.open(server.port, bobs, cursor=bob.cursor) as bob:
        while (frame := bob.next())["clientMsgId"] != "afterwards":
            if frame["type"] != frames.CURSOR:
                found.append(frame["clientMsgId"])
    assert distinct([*found, "afterwards"]) == sent


def test_a_client_that_never_reads_is_cut_off_and_frees_its_memory(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outgoing, "MOST_FRAMES", 10)
    monkeypatch.setattr(chat_connection, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(websocket_protocol, "LINGER_SECONDS", 0.1)
    with ExitStack() as opened:
        opened.enter_context(slow_client(server.port, make_token("bob", Scope.CHAT)))
        ann = opened.enter_context(ChatClient.open(server.port, make_token("ann", Scope.CHAT)))
        number = 0
        while connections("bob"):
            ann.send("bob", str(number), LARGE)
            ann.expect_ack("saved", str(number))
            number += 1
            assert number < 1000
        wait_until(lambda: len(server.uvicorn.server_state.connections) == 1, "only the other connection is left")


def test_a_client_that_does_not_answer_pings_is_cut_off_although_its_buffers_are_full(
    server: Server,
) -> None:
    with slow_client(server.port, make_token("bob", Scope.CHAT)):
        protocol: Any
        (protocol,) = server.uvicorn.server_state.connections
        loop = next(iter(chat._by_loop))
        wait_until(lambda: connections("bob"), "it is connected")
        (connection,) = connections("bob")
        frame = outgoing.OutFrame.of(frames.frame(frames.SINGLE_CHAT, body="x" * 1_000_000))

        def add() -> None:
            if connection._outgoing.has_room_for(frame):
                connection._outgoing.add(frame)
                loop.call_later(0.01, add)

        loop.call_soon_threadsafe(add)
        wait_until(lambda: is_stuck(connection), "nothing more can be sent")
        loop.call_soon_threadsafe(protocol.keepalive_timeout)
        wait_until(lambda: not server.uvicorn.server_state.connections, "the connection is cut off")


def test_a_long_history_is_sent_at_the_pace_of_the_client_instead_of_closing_the_connection(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outgoing, "MOST_FRAMES", 3)
    monkeypatch.setattr(chat_connection, "PAGE", 7)
    bobs = make_token("bob", Scope.CHAT)
    with ChatClient.open(server.port, bobs) as bob:
        bob.read_until_cursor()
    sent = [str(number) for number in range(200)]
    with ChatClient.open(server.port, make_token("ann", Scope.CHAT)) as ann:
        for number in sent:
            ann.send("bob", number, LARGE)
            ann.expect_ack("saved", number)
    with slow_client(server.port, bobs, cursor=bob.cursor) as bob:
        wait_until(lambda: connections("bob") and is_stuck(connections("bob")[0]), "nothing more can be sent")
        assert distinct(ids(bob.read_many(len(sent)))) == sent


# order


def hold_reads(monkeypatch: pytest.MonkeyPatch, user: str) -> threading.Event:
    """Let reads of the ledger for a user wait until the event is set."""
    may_read = threading.Event()
    read_page = ChatConnection._read_page

    def read_late(self: ChatConnection) -> Any:
        if self.user == user:
            assert may_read.wait(SECONDS)
        return read_page(self)

    monkeypatch.setattr(ChatConnection, "_read_page", read_late)
    return may_read


def test_new_messages_do_not_overtake_those_that_a_client_has_missed(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_connection, "HOLD_SECONDS", NEVER)
    bobs = make_token("bob", Scope.CHAT)
    with ChatClient.open(server.port, bobs) as bob:
        bob.read_until_cursor()
    with ChatClient.open(server.port, make_token("ann", Scope.CHAT)) as ann:
        ann.send("bob", "missed")
        ann.expect_ack("saved", "missed")
        may_read = hold_reads(monkeypatch, "bob")
        with ChatClient.open(server.port, bobs, cursor=bob.cursor) as bob:
            wait_until(lambda: connections("bob"), "it is connected")
            ann.send("bob", "new")
            ann.expect_ack("saved", "new")
            wait_until(lambda: connections("bob")[0]._held._waiting, "the new message has arrived")
            may_read.set()
            assert ids(bob.read_many(2)) == ["missed", "new"]


def test_new_messages_do_not_wait_for_a_ledger_that_does_not_answer(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_connection, "HOLD_SECONDS", 0.2)
    may_read = hold_reads(monkeypatch, "bob")
    with (
        ChatClient.open(server.port, make_token("bob", Scope.CHAT)) as bob,
        ChatClient.open(server.port, make_token("ann", Scope.CHAT)) as ann,
    ):
        ann.send("bob", "new")
        assert bob.next()["clientMsgId"] == "new"
        may_read.set()


def test_a_receipt_saved_does_not_overtake_accepted(
    server: Server,
    two_phase: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The saver is done before the API has read the answer of Redis."""
    receive = receiving.Receiving.chat

    async def receive_late(self: receiving.Receiving, message: ChatMessage) -> Receipt:
        receipt = await receive(self, message)
        assert await asyncio.to_thread(save_any_shard, 10, until_idle=True)
        await asyncio.to_thread(wait_until, lambda: connections("ann")[0]._held._waiting, "`saved` has arrived")
        return receipt

    monkeypatch.setattr(receiving.Receiving, "chat", receive_late)
    with ChatClient.open(server.port, make_token("ann", Scope.CHAT)) as ann:
        ann.read_until_cursor()
        ann.send("bob", "1")
        ann.expect_ack("accepted", "1")
        ann.expect_ack("saved", "1")
