"""The chat over a real WebSocket: what is answered to which frame, and what is written."""

from __future__ import annotations

import logging

import pytest

import metrics
import settings
from api import chat, chat_connection, token_cache, tokens
from models.engine import engine, sessions
from models.receipts import Switch
from receipts.chat_messages import LONGEST_BODY, ChatMessage, save_now
from receipts.deliver import deliver_any_shard
from receipts.keys import key_folder
from receipts.save import save_any_shard
from receipts.signing import verify
from receipts.switches import set_switch
from tests.api.chat_clients import FIELDS, ChatClient
from tests.api.chat_fixtures import Configure
from tests.api.server import Server
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import scalar

COUNT = "SELECT count(*) FROM ledger.chat_message"


def save() -> None:
    assert save_any_shard(10, until_idle=True)


@pytest.mark.guarantee
def test_a_message_is_accepted_at_once_and_saved_later(two_phase: None, ann: ChatClient, bob: ChatClient) -> None:
    before = metrics.RECEIPT_ACK_SECONDS._sum.get()
    ann.send("bob", "1", "你好", sendTs=1_700_000_000_000)
    accepted = ann.expect_ack("accepted", "1")
    assert scalar(COUNT) == 0
    save()
    saved = ann.expect_ack("saved", "1")
    message = ChatMessage("ann", "bob", "1", "你好")
    keys = {key.key_id: key.public for key in key_folder().list_keys()}
    for receipt in (accepted, saved):
        verify(receipt, keys)
        assert (receipt["sha256"], receipt["id"]) == (message.sha256, str(message.id))
    names = ["ann", "bob", "1", str(message.id)]
    assert bob.read() == dict(zip(FIELDS, ["SINGLE_CHAT", None, *names, "你好", None], strict=True))
    assert scalar("SELECT body FROM ledger.chat_message") == "你好"
    assert metrics.RECEIPT_ACK_SECONDS._sum.get() > before


@pytest.mark.guarantee
def test_a_message_is_saved_at_once_if_two_phase_is_off(ann: ChatClient, bob: ChatClient) -> None:
    ann.send("bob", "1")
    assert ann.expect_ack("saved", "1")["policy"] == "postgresql-commit"
    assert scalar(COUNT) == 1
    assert bob.read()["body"] == "hello"


def test_other_connections_of_the_sender_get_the_receipt_once(server: Server, token: str, ann: ChatClient) -> None:
    with ChatClient.open(server.port, token) as other:
        other.read_until_cursor()
        for number in ("1", "2"):
            ann.send("bob", number)
            ann.expect_ack("saved", number)
            other.expect_ack("saved", number)


def test_a_message_to_oneself_is_acknowledged_and_delivered(ann: ChatClient) -> None:
    ann.read_until_cursor()
    ann.send("ann", "1")
    assert [(frame["type"], frame["ackType"]) for frame in ann.read_many(2)] == [
        ("ACK", "saved"),
        ("SINGLE_CHAT", None),
    ]


def test_a_repeated_message_gets_the_receipt_that_it_has(two_phase: None, ann: ChatClient) -> None:
    ann.send("bob", "1")
    assert not ann.expect_ack("accepted", "1")["duplicate"]
    ann.send("bob", "1")
    assert ann.expect_ack("accepted", "1")["duplicate"]
    save()
    saved = ann.expect_ack("saved", "1")
    ann.send("bob", "1")
    again = ann.expect_ack("saved", "1")
    assert (again["duplicate"], again["ledgerSeq"]) == (True, saved["ledgerSeq"])
    assert scalar(COUNT) == 1


def test_a_repeated_message_is_recognised_without_the_receipt_log(ann: ChatClient) -> None:
    for is_duplicate in (False, True):
        ann.send("bob", "1")
        assert ann.expect_ack("saved", "1")["duplicate"] is is_duplicate
    assert scalar(COUNT) == 1


@pytest.mark.parametrize("two_phase_enabled", ["true", "false"])
def test_an_id_that_was_used_for_something_else_is_refused(
    configure: Configure, two_phase_enabled: str, ann: ChatClient
) -> None:
    configure(RECEIPT_TWO_PHASE_ENABLED=two_phase_enabled)
    ann.send("bob", "1", "one")
    assert ann.read()["type"] == "ACK"
    ann.send("bob", "1", "two")
    ann.expect_error("idempotency_conflict")
    ann.send("cid", "1", "one")
    ann.expect_error("idempotency_conflict")


def test_a_banned_word_is_refused_and_nothing_is_written(
    two_phase: None, configure: Configure, ann: ChatClient
) -> None:
    configure(RECEIPT_BANNED_WORDS="spam,STRASSE")
    for number, body in enumerate(("a SPAM b", "Straße")):
        ann.send("bob", str(number), body)
        ann.expect_error("content_rejected")
    ann.send("bob", "0", "harmless")
    ann.expect_ack("accepted", "0")
    save()
    assert scalar(COUNT) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        "1",
        "null",
        "[" * 100_000,
        "1" * 5000,
        b"{}",
        "{}",
        '{"type": "PING"}',
        '{"type": "SINGLE_CHAT", "to": "bob", "clientMsgId": "1"}',
        '{"type": "SINGLE_CHAT", "to": "bob", "clientMsgId": 1, "body": "x"}',
        '{"type": "SINGLE_CHAT", "to": "bob", "clientMsgId": "1", "body": {}}',
        '{"type": "SINGLE_CHAT", "to": "bob", "clientMsgId": "1", "body": "x", "sendTs": NaN}',
        '{"type": "SINGLE_CHAT", "to": "bob", "clientMsgId": "1", "body": "x", "sendTs": true}',
        '{"type": "SINGLE_CHAT", "to": "bob", "clientMsgId": "1", "body": "\\u0000"}',
        '{"type": "SINGLE_CHAT", "to": "bob", "clientMsgId": "1", "body": "\\ud800"}',
        '{"type": "SINGLE_CHAT", "to": "\\ud800", "clientMsgId": "\\ud800", "body": "x"}',
        '{"type": "SINGLE_CHAT", "to": "bob", "clientMsgId": "1", "body": "x", "unknown": 1}',
        '{"type": "SINGLE_CHAT", "to": "bob", "clientMsgId": "1", "body": "x", "\\ud800": 1}',
        '{"type": "SINGLE_CHAT", "from": "bob", "to": "bob", "clientMsgId": "1", "body": "x"}',
    ],
)
def test_an_invalid_frame_is_answered_and_the_connection_stays_open(ann: ChatClient, text: str | bytes) -> None:
    ann.connection.send(text)
    ann.expect_error("bad_message")
    ann.send("bob", "1", "x", **{"from": "ann", "serverMsgId": None, "ackType": None, "code": None})
    ann.expect_ack("saved", "1")


def test_an_error_names_the_message_unless_its_id_is_invalid(ann: ChatClient) -> None:
    for given, shown in (("1", "1"), ("x" * 101, None), ("\ud800", None), ({}, None)):
        ann.send("bob", given, body=None)  # type: ignore[arg-type]
        assert ann.read()["clientMsgId"] == shown


def test_a_message_that_is_too_large_is_answered_and_the_largest_one_is_saved(ann: ChatClient) -> None:
    ann.send("bob", "1", "x" * (LONGEST_BODY + 1))
    ann.expect_error("bad_message")
    ann.send("bob", "1", "x" * chat_connection.FRAME_BYTES)
    assert "262,144 bytes" in ann.expect_error("bad_message")
    ann.send("bob", "1", "\x01" * LONGEST_BODY)  # six characters each in JSON
    ann.expect_ack("saved", "1")
    assert scalar("SELECT length(body) FROM ledger.chat_message") == LONGEST_BODY


def test_a_frame_beyond_the_limit_of_the_server_ends_the_connection(ann: ChatClient) -> None:
    ann.send("bob", "1", "x" * 1_048_576)
    assert ann.close_code() == 1009


def test_a_client_that_sends_only_nonsense_is_cut_off_after_it_was_told(ann: ChatClient) -> None:
    for _ in range(chat_connection.MOST_ERRORS):
        ann.connection.send("nonsense")
    for _ in range(chat_connection.MOST_ERRORS):
        ann.expect_error("bad_message")
    assert ann.close_code() == 1008


def test_messages_of_a_sender_arrive_in_order(two_phase: None, ann: ChatClient, bob: ChatClient) -> None:
    ids = [str(number) for number in range(100)]
    for each in ids:
        ann.send("bob", each)
    assert [ann.expect_ack("accepted", each)["clientId"] for each in ids] == ids
    save()
    assert [frame["clientMsgId"] for frame in bob.read_many(len(ids))] == ids


def test_two_phase_can_be_switched_off_while_a_client_is_connected(
    two_phase: None, ann: ChatClient, bob: ChatClient
) -> None:
    ann.send("bob", "1")
    ann.expect_ack("accepted", "1")
    with engine().begin() as connection:
        set_switch(connection, Switch.TWO_PHASE, is_on=False, actor="test")
    save()  # a saver copies the switches to Redis
    ann.expect_ack("saved", "1")
    ann.send("bob", "2")
    ann.expect_ack("saved", "2")
    assert [frame["clientMsgId"] for frame in bob.read_many(2)] == ["1", "2"]


@pytest.fixture
def quick_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are also read from the ledger, soon. It must come before the fixtures that connect."""
    monkeypatch.setattr(chat_connection, "SYNC_SECONDS", 0.1)


def test_a_message_is_delivered_before_it_is_saved_and_not_again_afterwards(
    quick_sync: None, two_phase: None, configure: Configure, ann: ChatClient, bob: ChatClient
) -> None:
    configure(RECEIPT_DELIVER_BEFORE_SAVED="true")
    for number in ("1", "2"):
        ann.send("bob", number)
        ann.expect_ack("accepted", number)
        assert deliver_any_shard(10, until_idle=True)
        assert bob.read()["clientMsgId"] == number
        assert scalar(COUNT) == int(number) - 1
        save()
        ann.expect_ack("saved", number)
        ann.read_until_cursor()
        bob.read_until_cursor()


def test_a_message_that_is_rejected_after_it_was_accepted_is_reported_to_its_sender(
    two_phase: None, ann: ChatClient
) -> None:
    with sessions().begin() as session:  # the receipt log does not know it
        save_now(session, ChatMessage("ann", "bob", "1", "one"), ordered=True)
    ann.send("bob", "1", "two")
    ann.expect_ack("accepted", "1")
    save()
    frame = ann.read()
    assert (frame["type"], frame["code"], frame["clientMsgId"]) == ("ERROR", "idempotency_conflict", "1")
    ann.send("bob", "1", "one")
    ann.expect_ack("accepted", "1")
    save()
    ann.expect_ack("saved", "1")


@pytest.mark.guarantee
def test_messages_are_accepted_while_the_ledger_is_down(
    two_phase: None, ann: ChatClient, bob: ChatClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_connection, "SYNC_SECONDS", 0.05)
    ann.read_until_cursor()
    ids = [str(number) for number in range(20)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DATABASE_URL", "postgresql://celeriac@127.0.0.1:1/none")
        settings.current.cache_clear()
        for each in ids:
            ann.send("bob", each)
            ann.expect_ack("accepted", each)
    settings.current.cache_clear()
    save()
    assert [frame["clientMsgId"] for frame in bob.read_many(len(ids))] == ids


def test_a_token_that_is_revoked_ends_its_connections(
    server: Server, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_connection, "SYNC_SECONDS", 0.1)
    monkeypatch.setattr(token_cache, "FRESH_SECONDS", 0.0)
    with ChatClient.open(server.port, token) as client:
        client.read_until_cursor()
        with engine().begin() as connection:
            tokens.revoke(connection, "ann")
        assert client.close_code() == 1008


def test_a_connection_that_is_idle_for_long_is_closed(
    server: Server, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_connection, "SYNC_SECONDS", 0.1)
    monkeypatch.setattr(chat_connection, "IDLE_SECONDS", 0.2)
    with ChatClient.open(server.port, token) as client:
        assert client.close_code() == 1000


def test_an_error_shows_no_address_and_the_message_is_saved_when_it_is_repeated(
    ann: ChatClient, monkeypatch: pytest.MonkeyPatch, ledger: ServersOfTests
) -> None:
    ann.read_until_cursor()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DATABASE_URL", "postgresql://celeriac@127.0.0.1:1/none")
        settings.current.cache_clear()
        ann.send("bob", "1")
        sentence = ann.expect_error("unreachable")
    settings.current.cache_clear()
    assert "127.0.0.1" not in sentence
    ann.send("bob", "1")
    ann.expect_ack("saved", "1")


def test_a_server_that_stops_tells_its_clients_to_reconnect(server: Server, ann: ChatClient) -> None:
    server.uvicorn.should_exit = True
    assert ann.close_code() == 1012
    wait_until(lambda: not server.thread.is_alive(), "the server has stopped")


def test_a_connection_that_is_lost_leaves_nothing_behind(
    server: Server, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ChatClient.open(server.port, token) as client:
        client.read_until_cursor()
        assert chat._by_loop
        client.connection.socket.close()
    wait_until(lambda: not chat._by_loop, "the hub is closed")
    wait_until(lambda: not server.uvicorn.server_state.connections, "no connection is left")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
