"""What a user has missed: nothing is skipped, whatever the order of commits, and nothing is read without an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from models.engine import autocommit, engine, sessions
from models.sql import sql
from receipts import chat_messages, frames
from receipts.chat_history import MISSED, BadCursor, Missed, read_missed
from receipts.chat_messages import ChatMessage
from receipts.receipt import COMMIT
from receipts.save_results import Saved
from tests.servers import ServersOfTests

LIMIT = 3
PLAN = "EXPLAIN (FORMAT JSON) "


@pytest.fixture
def reader(ledger: ServersOfTests) -> Iterator[Connection]:
    with autocommit(engine()) as connection:
        yield connection


class Reader:
    """A connection that reads until it has everything, and later goes on from there."""

    def __init__(self, connection: Connection, user: str, cursor: int | None = None) -> None:
        self.connection = connection
        self.user = user
        self.given_cursor = cursor
        self.pages: list[Missed] = []

    @property
    def cursor(self) -> int:
        return self.pages[-1].cursor

    def read(self, *, between_pages: Callable[[], object] = lambda: None) -> list[str]:
        found = self.read_page()
        while not self.pages[-1].is_complete:
            between_pages()
            found += self.read_page()
        return found

    def read_page(self) -> list[str]:
        after = self.pages[-1] if self.pages else None
        page = read_missed(self.connection, self.user, self.given_cursor, LIMIT, after=after)
        assert len(page.frames) <= LIMIT
        self.pages.append(page)
        return [f"{frame['type']} {frame['clientMsgId']}" for frame in page.frames]

    def reconnect(self) -> Reader:
        """Return a new connection with the cursor of this one. It may read again what is later than the cursor."""
        return Reader(self.connection, self.user, self.cursor)


def save(db: Session, *ids: str, sender: str = "ann", receiver: str = "bob") -> None:
    """Save messages in one batch, all accepted at the same time, as a saver does."""
    given = [ChatMessage(sender, receiver, each, f"body of {each}") for each in ids]
    rows = [each.row(None, policy=COMMIT) for each in given]
    read = [chat_messages.Given(*each, None) for each in zip(given, rows, strict=True)]
    results = chat_messages.save(db, read, chat_messages.prepare(read))
    assert all(isinstance(result, Saved) for result in results)


def save_now(*ids: str, **users: str) -> None:
    for each in ids:
        with sessions().begin() as session:
            save(session, each, **users)


def chats(*ids: str) -> list[str]:
    return [f"{frames.SINGLE_CHAT} {each}" for each in ids]


def test_a_client_without_a_cursor_gets_no_history_and_everything_later(reader: Connection) -> None:
    save_now("before")
    client = Reader(reader, "bob")
    assert client.read() == []
    save_now("after")
    assert client.read() == chats("after")


@pytest.mark.guarantee
def test_a_row_that_commits_late_is_not_skipped_although_a_later_one_was_read(reader: Connection) -> None:
    """The first transaction has the smaller id and commits last. The largest id that was read would skip it."""
    client = Reader(reader, "bob")
    assert client.read() == []
    with sessions().begin() as first:
        save(first, "first", sender="cid")  # another pair of users: the new chat of one pair is locked
        save_now("second")
        assert client.read() == chats("second")
        other = client.reconnect()
    assert client.read() == chats("first")
    assert {*other.read()} >= {*chats("first")}


@pytest.mark.guarantee
def test_a_row_that_commits_between_two_pages_is_not_skipped(reader: Connection) -> None:
    """Its transaction is older than the end of the first page, which was sent already."""
    client = Reader(reader, "bob")
    client.read()
    late = sessions()()
    save(late, "late", sender="cid")
    save_now(*"abcdefgh")
    assert client.read(between_pages=late.commit) == chats(*"abcdefgh")
    late.close()
    assert len(client.pages) == 1 + 3
    other = client.reconnect()
    assert client.read() == chats("late")
    assert {*other.read()} >= {*chats("late")}, "the cursor must not pass what was running at the first page"


@pytest.mark.guarantee
def test_a_client_that_is_cut_off_after_any_page_continues_without_a_gap(reader: Connection) -> None:
    start = Reader(reader, "bob")
    start.read()
    expected = [f"m{number}" for number in range(10)]
    with sessions().begin() as session:
        save(session, *expected[:7])  # more than two pages in one transaction
    save_now(*expected[7:])
    for pages in range(1, 5):
        client = start.reconnect()
        found = [each for _ in range(pages) for each in client.read_page()]
        assert found == chats(*expected)[: pages * LIMIT]
        assert {*found, *client.reconnect().read()} == {*chats(*expected)}
    assert client.pages[-1].is_complete


def test_messages_of_one_batch_keep_their_order_although_they_were_accepted_at_the_same_time(
    reader: Connection,
) -> None:
    client = Reader(reader, "bob")
    client.read()
    ids = [f"m{number}" for number in range(20)]
    with sessions().begin() as session:
        save(session, *ids)
    assert client.read() == chats(*ids)


def test_an_old_transaction_that_stays_open_does_not_make_a_connection_read_everything_again(
    reader: Connection,
) -> None:
    """A prepared transaction may stay for hours. The cursor waits for it; the same connection goes on."""
    client = Reader(reader, "bob")
    with sessions().begin() as old:
        save(old, "old", sender="cid")
        id_: int = old.execute(sql("SELECT CAST(CAST(pg_current_xact_id() AS text) AS bigint)")).scalar_one()
        client.read()
        for number in range(3):
            save_now(f"m{number}")
            assert client.read() == chats(f"m{number}")
        assert client.cursor <= id_
        assert client.reconnect().read() == chats("m0", "m1", "m2")
    assert client.read() == chats("old")


def test_a_sender_gets_the_receipts_of_messages_and_a_receiver_the_messages(reader: Connection) -> None:
    senders, receivers, strangers = (Reader(reader, user) for user in ("ann", "bob", "cid"))
    for each in (senders, receivers, strangers):
        each.read()
    save_now("one")
    senders.read()
    (ack,) = senders.pages[-1].frames
    message = ChatMessage("ann", "bob", "one", "body of one")
    assert (ack["type"], ack["ackType"], ack["serverMsgId"]) == (frames.ACK, "saved", str(message.id))
    assert (ack["receipt"]["level"], ack["receipt"]["sha256"]) == ("saved", message.sha256)
    assert receivers.read() == chats("one")
    assert strangers.read() == []


def test_a_message_to_oneself_is_not_cut_in_half_by_the_end_of_a_page(reader: Connection) -> None:
    client = Reader(reader, "ann")
    client.read()
    with sessions().begin() as session:
        save(session, *"abcd", receiver="ann")
    assert client.read() == [f"{type_} {each}" for each in "abcd" for type_ in (frames.SINGLE_CHAT, frames.ACK)]


def test_a_receipt_that_was_pruned_is_acknowledged_without_it(reader: Connection) -> None:
    client = Reader(reader, "ann")
    client.read()
    save_now("one")
    with engine().begin() as connection:
        connection.execute(sql("DELETE FROM ledger.receipt"))
    client.read()
    (ack,) = client.pages[-1].frames
    assert (ack["ackType"], ack["body"], "receipt" in ack) == ("saved", None, False)


def test_a_cursor_of_another_server_is_refused_instead_of_skipping_messages(reader: Connection) -> None:
    with pytest.raises(BadCursor):
        read_missed(reader, "bob", 2**62, LIMIT)


def test_rows_of_another_server_are_not_sent_again_at_each_read(reader: Connection) -> None:
    """After the ledger was restored elsewhere, old rows have ids of transactions that are not there yet."""
    save_now("restored")
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.chat_message SET transaction_id = 4611686018427387904"))
    client = Reader(reader, "bob")
    client.read()
    assert client.read() == []


def test_both_halves_of_a_large_history_are_read_through_their_indexes(reader: Connection) -> None:
    with engine().begin() as connection:
        connection.execute(FILL)
        connection.execute(sql("ANALYZE ledger.chat_message"))
        connection.execute(sql("ANALYZE ledger.receipt"))
    explain = sql(PLAN + MISSED.text)
    none = dict.fromkeys(("seen", "after_place", "after_id", "after_is_own"))
    plan: Any = reader.execute(explain, {"user": "ann", "first": 5, "limit": LIMIT, **none}).scalar()
    nodes = list(_nodes(plan[0]["Plan"]))
    assert {node.get("Index Name") for node in nodes} >= {"ix_chat_message_to", "ix_chat_message_from"}
    assert [node for node in nodes if node["Node Type"] == "Seq Scan"] == []


FILL = sql("""
    WITH made AS (
        INSERT INTO ledger.chat (id, first_user_id, second_user_id) VALUES (gen_random_uuid(), 'ann', 'bob')
        RETURNING id),
    messages AS (
        INSERT INTO ledger.chat_message (id, chat_id, client_msg_id, from_user_id, to_user_id, body, transaction_id)
        SELECT gen_random_uuid(), made.id, n,
               CASE WHEN n % 2 = 0 THEN 'ann' ELSE 'bob' END, CASE WHEN n % 2 = 0 THEN 'bob' ELSE 'ann' END, 'x', n / 50
        FROM made, generate_series(1, 20000) AS n
        RETURNING id)
    INSERT INTO ledger.receipt (id, level, kind, principal, payload_sha, policy, accepted_at, promised_by)
    SELECT id, 'saved', 'chat', 'x', 'x', 'x', ledger.ledger_now(), ledger.ledger_now() FROM messages
""")


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)
