"""Push frames between processes: a Redis that restarts and processes that are killed lose nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

import settings
from api import chat, chat_connection
from api.chat_connection import ChatConnection
from api.tokens import Scope
from embedded.home import Home
from embedded.program import Program
from embedded.redis import RECEIPTS, Redis
from embedded.roles import PORTS
from receipts import frames, push
from receipts.save import save_any_shard
from tests.api.callers import make_token
from tests.api.chat_clients import ApiProcess, ChatClient, StartApi, distinct, ids, read_all
from tests.api.conftest import server  # noqa: F401 - a fixture
from tests.api.server import Server
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import scalar

NEVER = 3600.0


@pytest.fixture
def two_phase(ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "true")
    settings.current.cache_clear()


@pytest.fixture
def without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not read the ledger every few seconds, so that a test sees which event made a connection read it."""
    monkeypatch.setattr(chat_connection, "SYNC_SECONDS", NEVER)


@pytest.fixture
def start_api(ledger: ServersOfTests, tmp_path: Path) -> Iterator[StartApi]:
    started: list[ApiProcess] = []

    def start() -> ApiProcess:
        started.append(ApiProcess(tmp_path / f"api-{len(started)}"))
        return started[-1]

    yield start
    for process in started:
        process.child.kill()


@contextmanager
def saver() -> Iterator[None]:
    """Save accepted messages in the background."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            save_any_shard(10, until_idle=True)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


# Redis


@pytest.fixture
def own_redis(ledger: ServersOfTests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnRedis]:
    made = OwnRedis(tmp_path / "redis")
    made.start()
    monkeypatch.setenv("REDIS_URL", made.server.url)
    settings.current.cache_clear()
    yield made
    made.stop()


class OwnRedis:
    """A receipt log that a test may stop."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder)
        self.home.create()
        port = self.home.ports(dict.fromkeys(PORTS, 0), wished={})["redis-receipts"]
        self.server = Redis(self.home, "redis-receipts", port, RECEIPTS)
        self.program = Program(
            self.server.role, self.server.command, prepare=self.server.prepare, is_ready=self.server.is_ready
        )

    def start(self) -> None:
        self.running = self.program.start(self.home)
        self.running.await_ready(20)

    def stop(self) -> None:
        self.running.end()


@pytest.fixture
def two_servers(own_redis: OwnRedis, stack: ServersOfTests) -> Iterator[list[Server]]:
    made = [Server(), Server()]
    for each in made:
        each.start()
    yield made
    for each in made:
        each.stop()


@pytest.mark.guarantee
def test_after_a_restart_of_redis_every_connection_reads_what_it_has_missed(
    own_redis: OwnRedis, two_servers: list[Server], two_phase: None, without_sync: None
) -> None:
    here, there = (each.port for each in two_servers)
    with ExitStack() as opened:
        ann = opened.enter_context(ChatClient.open(here, make_token("ann", Scope.CHAT)))
        cid = opened.enter_context(ChatClient.open(here, make_token("cid", Scope.CHAT)))
        bob = opened.enter_context(ChatClient.open(there, make_token("bob", Scope.CHAT)))
        for client in (ann, bob, cid):
            client.read_until_cursor()
        ann.send("bob", "1")
        ann.expect_ack("accepted", "1")
        assert save_any_shard(10, until_idle=True)
        ann.expect_ack("saved", "1")
        assert bob.read()["clientMsgId"] == "1"

        own_redis.stop()
        for number, to in enumerate(("bob", "cid"), 2):
            ann.send(to, str(number))
            assert ann.expect_ack("saved", str(number))["ordered"] is False
        assert cid.read()["clientMsgId"] == "3", "the receiver is connected to the process of the sender"

        own_redis.start()
        assert bob.read()["clientMsgId"] == "2"
        ann.send("bob", "4")
        ann.expect_ack("accepted", "4")
        assert save_any_shard(10, until_idle=True)
        ann.expect_ack("saved", "4")
        assert bob.read()["clientMsgId"] == "4"


def test_without_fail_open_a_message_is_refused_while_redis_is_down(
    own_redis: OwnRedis, two_servers: list[Server], two_phase: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECEIPT_FAIL_OPEN", "false")
    settings.current.cache_clear()
    with ChatClient.open(two_servers[0].port, make_token("ann", Scope.CHAT)) as ann:
        ann.read_until_cursor()
        own_redis.stop()
        ann.send("bob", "1")
        ann.expect_error("server_busy")
        own_redis.start()
        ann.send("bob", "1")
        assert not ann.expect_ack("accepted", "1")["duplicate"]
    assert scalar("SELECT count(*) FROM ledger.chat_message") == 0


def test_a_client_that_connects_while_redis_is_down_gets_messages_when_it_is_back(
    own_redis: OwnRedis, two_servers: list[Server], without_sync: None
) -> None:
    here, there = (each.port for each in two_servers)
    own_redis.stop()
    with (
        ChatClient.open(here, make_token("ann", Scope.CHAT)) as ann,
        ChatClient.open(there, make_token("bob", Scope.CHAT)) as bob,
    ):
        bob.read_until_cursor()
        ann.send("bob", "1")
        ann.expect_ack("saved", "1")
        own_redis.start()
        assert bob.read()["clientMsgId"] == "1"


def test_a_redis_that_hangs_is_left_and_found_again(
    own_redis: OwnRedis, two_servers: list[Server], without_sync: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections stay open, so only the missing answer to a ping tells."""
    monkeypatch.setattr(push, "PING_SECONDS", 0.2)
    monkeypatch.setattr(push, "ANSWER_SECONDS", 0.5)
    here, there = (each.port for each in two_servers)
    with (
        ChatClient.open(here, make_token("ann", Scope.CHAT)) as ann,
        ChatClient.open(there, make_token("bob", Scope.CHAT)) as bob,
    ):
        bob.read_until_cursor()
        own_redis.running.popen.send_signal(signal.SIGSTOP)
        try:
            ann.send("bob", "1")
            ann.expect_ack("saved", "1")
            hubs = [chats.hub for chats in chat._by_loop.values()]
            wait_until(lambda: all(hub._is_down for hub in hubs), "the outage is noticed")
        finally:
            own_redis.running.popen.send_signal(signal.SIGCONT)
        assert bob.read()["clientMsgId"] == "1"


def test_a_process_is_subscribed_to_the_users_that_have_a_socket_and_to_no_others(
    server: Server,  # noqa: F811
) -> None:
    client: Any = redis.Redis.from_url(settings.current().redis_url, decode_responses=True)

    def subscribed(*users: str) -> Callable[[], bool]:
        return lambda: set(client.pubsub_channels()) == {frames.channel_of(user) for user in users}

    ann, bob = make_token("ann", Scope.CHAT), make_token("bob", Scope.CHAT)
    with ChatClient.open(server.port, ann):
        wait_until(subscribed("", "ann"), "ann is subscribed")
        with ChatClient.open(server.port, ann), ChatClient.open(server.port, bob) as bobs:
            bobs.read_until_cursor()
            assert subscribed("", "ann", "bob")()
        wait_until(subscribed("", "ann"), "bob is no longer subscribed")
        with ChatClient.open(server.port, bob) as bobs:
            bobs.read_until_cursor()
            assert subscribed("", "ann", "bob")()
    wait_until(subscribed(), "the connection is closed")
    client.close()


# many clients, and processes that die


def test_many_clients_that_connect_at_once_leave_threads_for_others(
    server: Server,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_page, lock, running, most = ChatConnection._read_page, threading.Lock(), 0, 0

    def count(self: ChatConnection) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        try:
            return read_page(self)
        finally:
            with lock:
                running -= 1

    monkeypatch.setattr(ChatConnection, "_read_page", count)
    token = make_token("bob", Scope.CHAT)
    with ExitStack() as opened:
        clients = [opened.enter_context(ChatClient.open(server.port, token)) for _ in range(60)]
        for client in clients:
            client.read_until_cursor()
    assert 0 < most <= chat.READS_AT_ONCE


@pytest.mark.guarantee
def test_nothing_is_lost_if_the_process_of_the_receiver_is_killed(two_phase: None, start_api: StartApi) -> None:
    first, second = start_api(), start_api()
    bobs = make_token("bob", Scope.CHAT)
    sent = [str(number) for number in range(60)]
    found: list[str] = []
    with saver(), ChatClient.open(first.port, make_token("ann", Scope.CHAT)) as ann:
        with ChatClient.open(second.port, bobs) as bob:
            bob.read_until_cursor()
            for number in sent[:20]:
                ann.send("bob", number)
            found += ids(bob.read_many(10))
            second.child.kill()
            for number in sent[20:]:
                ann.send("bob", number)
            found += read_all(bob)[0]
        with ChatClient.open(first.port, bobs, cursor=bob.cursor) as bob:
            while distinct(found)[-1:] != sent[-1:]:
                found.append(bob.read()["clientMsgId"])
        acks = [(frame["ackType"], frame["clientMsgId"]) for frame in ann.read_many(2 * len(sent))]
    assert distinct(found) == sent
    assert [id_ for level, id_ in acks if level == "accepted"] == sent
    assert [id_ for level, id_ in acks if level == "saved"] == sent


@pytest.mark.guarantee
def test_nothing_is_lost_or_saved_twice_if_the_process_of_the_sender_is_killed(
    two_phase: None, start_api: StartApi
) -> None:
    first, second = start_api(), start_api()
    anns = make_token("ann", Scope.CHAT)
    sent = [str(number) for number in range(60)]
    with saver(), ChatClient.open(second.port, make_token("bob", Scope.CHAT)) as bob:
        bob.read_until_cursor()
        accepted: set[str] = set()
        with ChatClient.open(first.port, anns) as ann:
            for number in sent:
                ann.send("bob", number)
                if len(accepted) == 20:
                    first.child.kill()
                    break
                accepted.add(ann.read()["clientMsgId"])
        with ChatClient.open(second.port, anns, cursor=ann.cursor) as ann:
            unknown = [number for number in sent if number not in accepted]
            for number in unknown:
                ann.send("bob", number)
            saved: set[str] = set()
            while saved != set(sent):
                frame = ann.read()
                if frame["ackType"] == "saved":
                    saved.add(frame["clientMsgId"])
        found: list[str] = []
        while len(distinct(found)) < len(sent):
            found.append(bob.read()["clientMsgId"])
    assert distinct(found) == sent
    assert scalar("SELECT count(*) FROM ledger.chat_message") == len(sent)
