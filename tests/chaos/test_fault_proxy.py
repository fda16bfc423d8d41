"""The fault proxy loses what it was told to lose, nothing else, and says that it did."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import psycopg2
import pytest
import redis

from chaos.conversations import PostgresConversation, RedisConversation
from chaos.fault_proxy import COMMIT, COMMIT_PREPARED, EVALSHA, Fault, FaultProxy
from tests.servers import Cluster, ServersOfTests

TABLE = "CREATE TABLE IF NOT EXISTS public.proxied (n integer NOT NULL)"


@pytest.fixture
def server(postgres: Cluster) -> Iterator[str]:
    with postgres.temporary_database() as name:
        url = postgres.server.url(database=name)
        execute(url, TABLE)
        yield url


@pytest.fixture
def proxy(server: str) -> Iterator[FaultProxy]:
    with FaultProxy(server) as proxy:
        yield proxy


def execute(url: str, statement: str) -> list[tuple[object, ...]]:
    """Execute a statement on a connection of its own and commit."""
    connection = psycopg2.connect(url)
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []
    finally:
        connection.close()


def count(url: str) -> object:
    return execute(url, "SELECT count(*) FROM public.proxied")[0][0]


INSERT = "INSERT INTO public.proxied VALUES (1)"


def test_an_unarmed_proxy_passes_everything(proxy: FaultProxy, server: str) -> None:
    execute(proxy.url, INSERT)
    assert execute(proxy.url, f"SELECT repeat('x', {1 << 20})") == [("x" * (1 << 20),)]
    assert count(server) == 1
    assert proxy.strikes == []


def test_a_lost_reply_leaves_the_client_without_an_answer_and_the_statement_executed(
    proxy: FaultProxy, server: str
) -> None:
    proxy.arm(Fault.LOSE_REPLY, COMMIT)
    with pytest.raises(psycopg2.OperationalError):
        execute(proxy.url, INSERT)
    assert count(server) == 1
    (strike,) = proxy.strikes
    assert (strike.statement, b"COMMIT\0" in strike.reply) == (b"COMMIT", True)


def test_a_reset_keeps_the_statement_from_the_server(proxy: FaultProxy, server: str) -> None:
    proxy.arm(Fault.RESET, COMMIT)
    with pytest.raises(psycopg2.OperationalError):
        execute(proxy.url, INSERT)
    assert count(server) == 0
    assert [strike.fault for strike in proxy.strikes] == [Fault.RESET]


def test_a_silent_connection_neither_executes_nor_fails(proxy: FaultProxy, server: str) -> None:
    failed: list[BaseException] = []

    def insert() -> None:
        try:
            execute(proxy.url, INSERT)
        except psycopg2.OperationalError as error:
            failed.append(error)

    proxy.arm(Fault.SILENCE, COMMIT)
    waiting = threading.Thread(target=insert)
    waiting.start()
    proxy.wait_until_struck()
    assert (count(server), failed) == (0, [])
    execute(proxy.url, INSERT)  # other connections work
    assert count(server) == 1
    proxy.close()
    waiting.join(10)
    assert len(failed) == 1


def test_a_rule_strikes_once_at_the_nth_match_of_any_connection(proxy: FaultProxy, server: str) -> None:
    proxy.arm(Fault.RESET, COMMIT, nth=3)
    execute(proxy.url, INSERT)
    execute(proxy.url, INSERT)
    assert proxy.strikes == []
    with pytest.raises(psycopg2.OperationalError):
        execute(proxy.url, INSERT)
    execute(proxy.url, INSERT)
    assert count(server) == 3
    assert len(proxy.strikes) == 1


def test_a_rule_is_not_taken_in_by_a_longer_statement_or_by_text_inside_one(proxy: FaultProxy, server: str) -> None:
    proxy.arm(Fault.RESET, COMMIT_PREPARED)
    execute(proxy.url, "INSERT INTO public.proxied SELECT length('COMMIT PREPARED')")
    proxy.arm(Fault.RESET, COMMIT)
    connection = psycopg2.connect(proxy.url)
    connection.autocommit = True
    with connection.cursor() as cursor, pytest.raises(psycopg2.errors.UndefinedObject):
        cursor.execute("COMMIT PREPARED 'no such transaction'")
    connection.close()
    assert (count(server), proxy.strikes) == (1, [])


def test_a_disarmed_proxy_strikes_no_more(proxy: FaultProxy, server: str) -> None:
    proxy.arm(Fault.RESET, COMMIT)
    proxy.disarm()
    execute(proxy.url, INSERT)
    assert count(server) == 1
    with pytest.raises(TimeoutError, match="a statement that the fault strikes"):
        proxy.wait_until_struck(0)


def test_a_client_whose_server_process_ends_notices_it_through_the_proxy(proxy: FaultProxy, server: str) -> None:
    connection = psycopg2.connect(proxy.url)
    execute(server, f"SELECT pg_terminate_backend({connection.info.backend_pid}, 10000)")
    with pytest.raises(psycopg2.OperationalError), connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    connection.close()


def test_a_connection_that_a_forked_child_has_inherited_is_reset_all_the_same(proxy: FaultProxy, server: str) -> None:
    """A socket is closed only when its last copy is."""
    connection = psycopg2.connect(proxy.url)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    proxy.arm(Fault.LOSE_REPLY, COMMIT)
    with connection.cursor() as cursor:
        cursor.execute(INSERT)
    with pytest.raises(psycopg2.OperationalError):
        connection.commit()
    os.close(writing)
    os.waitpid(child, 0)
    connection.close()
    assert count(server) == 1


def test_the_lost_reply_of_a_redis_script_leaves_its_effect(servers: ServersOfTests) -> None:
    address = servers.addresses["REDIS_URL"]
    with redis.Redis.from_url(address) as direct, FaultProxy(address) as proxy:
        direct.delete("proxied")
        with redis.Redis.from_url(proxy.url, retry=None, socket_timeout=10) as client:
            push = client.register_script("return redis.call('RPUSH', KEYS[1], ARGV[1])")
            push(keys=["proxied"], args=["first"])
            proxy.arm(Fault.LOSE_REPLY, EVALSHA)
            with pytest.raises(redis.exceptions.ConnectionError):
                push(keys=["proxied"], args=["second\r\n*1"])
            assert direct.lrange("proxied", 0, -1) == [b"first", b"second\r\n*1"]
            assert [strike.reply for strike in proxy.strikes] == [b":2\r\n"]
            direct.delete("proxied")


def test_the_lost_reply_of_a_pipeline_leaves_the_effects_of_all_its_commands(servers: ServersOfTests) -> None:
    """The reply to the first command may come before the second one is executed; it must not end the connection."""
    address = servers.addresses["REDIS_URL"]
    with redis.Redis.from_url(address) as direct, FaultProxy(address) as proxy:
        sha = direct.script_load("return redis.call('RPUSH', KEYS[1], ARGV[1])")
        for _ in range(20):
            direct.delete("proxied")
            with redis.Redis.from_url(proxy.url, retry=None, socket_timeout=10) as client:
                client.ping()
                pipeline = client.pipeline(transaction=False)
                pipeline.rpush("proxied", "first")
                pipeline.evalsha(sha, 1, "proxied", "second")
                proxy.arm(Fault.LOSE_REPLY, EVALSHA)
                with pytest.raises(redis.exceptions.ConnectionError):
                    pipeline.execute()
            assert direct.lrange("proxied", 0, -1) == [b"first", b"second"]
        direct.delete("proxied")


def started() -> PostgresConversation:
    """Return a conversation in which the client has asked for encryption, was refused, and has been let in."""
    conversation = PostgresConversation()
    ssl_request = (8).to_bytes(4, "big") + (80877103).to_bytes(4, "big")
    parameters = (3 << 16).to_bytes(4, "big") + b"user\0me\0\0"
    assert [each.statement for each in conversation.ask(ssl_request)] == [None]
    assert (conversation.waiting, conversation.answer(b"N"), conversation.waiting) == (0, 0, 0)
    assert list(conversation.ask((4 + len(parameters)).to_bytes(4, "big") + parameters))
    assert conversation.waiting == 1
    assert conversation.answer(message(b"R", b"\0\0\0\0") + READY) == 1
    return conversation


def message(kind: bytes, content: bytes) -> bytes:
    return kind + (4 + len(content)).to_bytes(4, "big") + content


READY = message(b"Z", b"I")


def test_a_statement_of_the_extended_protocol_is_recognised_whenever_it_is_executed() -> None:
    """It is named once and executed often, without its text."""
    conversation = started()
    named = message(b"P", b"s1\0COMMIT PREPARED 'x'\0\0\0") + message(b"S", b"")
    executed = message(b"B", b"\0s1\0\0\0\0\0\0\0") + message(b"E", b"\0\0\0\0\0") + message(b"S", b"")
    assert [statement for _, statement in conversation.ask(named)] == [None, None]
    for _ in range(2):
        assert [statement for _, statement in conversation.ask(executed)] == [None, b"COMMIT PREPARED 'x'", None]
    assert (conversation.waiting, conversation.answer(READY + READY), conversation.waiting) == (3, 2, 1)


def one_by_one(whole: bytes) -> list[bytes]:
    return [whole[at : at + 1] for at in range(len(whole))]


def test_a_statement_that_arrives_byte_by_byte_is_recognised_and_passed_on_whole() -> None:
    postgres, commands = started(), RedisConversation()
    sent = message(b"Q", b"COMMIT\0")
    assert [each for byte in one_by_one(sent) for each in postgres.ask(byte)] == [(sent, b"COMMIT")]
    sent = b"*2\r\n$7\r\nEVALSHA\r\n$2\r\n\r\n\r\n"
    assert [each for byte in one_by_one(sent) for each in commands.ask(byte)] == [(sent, b"EVALSHA \r\n")]


@pytest.mark.parametrize(
    "reply",
    [b"+OK\r\n", b":5\r\n", b"$-1\r\n", b"$3\r\na\r\n\r\n", b"*2\r\n*1\r\n+a\r\n$1\r\nb\r\n", b"%1\r\n+a\r\n:1\r\n"],
)
def test_a_reply_of_redis_counts_when_it_is_complete(reply: bytes) -> None:
    conversation = RedisConversation()
    assert [conversation.answer(byte) for byte in one_by_one(reply)] == [0] * (len(reply) - 1) + [1]


def test_a_delay_makes_every_statement_slower_until_it_is_ended(proxy: FaultProxy, server: str) -> None:
    proxy.delay(COMMIT, 0.1)
    began_at = time.monotonic()
    for _ in range(2):
        execute(proxy.url, INSERT)
    assert time.monotonic() - began_at >= 0.2
    assert count(server) == 2
    proxy.delay(COMMIT, 0)
    began_at = time.monotonic()
    execute(proxy.url, INSERT)
    assert time.monotonic() - began_at < 0.1
