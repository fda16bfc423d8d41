"""Chat messages of two users: what a message must look like, its entry, and how batches of them are saved.

    id             the id of the message everywhere: serverMsgId, taskId, and the primary key of `chat_message`. It is
                   computed from sender and clientMsgId, so that every way of saving finds a repetition
    entry          serverMsgId, clientMsgId, fromUserId, toUserId, msgType, body, sendTs, createdAtMs, producerServerId
    same message   a repetition with the same receiver, type and text; with another one it is rejected

A batch is saved by one statement: chats, members, messages and receipts. Only messages that exist already need another
one, which compares them.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from sqlalchemy.orm import Session

import settings
from models.driver_values import array, array_of_ids
from models.errors import Misuse
from models.receipts import Level
from models.sql import sql
from outbox.canonical_json import canonical_json
from outbox.lease import connection_of
from receipts import kinds, rows
from receipts.accept import Message
from receipts.errors import ContentRejected
from receipts.receipt import AOF_ALWAYS, COMMIT, Receipt, from_milliseconds
from receipts.save_results import Rejected, Saved, SaveResult
from receipts.streams.entries import Entry
from tasks.core.holders import holder_of
from tasks.core.task_ids import SEPARATOR, keyed_id
from tasks.submission.submit import IdempotencyConflict

LONGEST_ID: Final = 100  # characters of clientMsgId, msgType and user ids
LONGEST_BODY: Final = 32_768  # bytes
NOT_IN_AN_ID: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
LATEST_MS: Final = 253_402_300_799_000  # the end of the year 9999

_GIVEN: Final = """
    unnest(CAST(:ids AS uuid[]), CAST(:principals AS text[]), CAST(:client_ids AS text[]), CAST(:shas AS text[]),
           CAST(:accepted_ats AS timestamptz[]), CAST(:task_ids AS uuid[]), CAST(:chat_ids AS uuid[]),
           CAST(:tos AS text[]), CAST(:msg_types AS text[]), CAST(:bodies AS text[]), CAST(:producers AS text[]),
           CAST(:sent_ats AS timestamptz[]))
        WITH ORDINALITY AS given(id, principal, client_id, payload_sha, accepted_at, task_id, chat_id, to_user_id,
                                 msg_type, body, producer, sent_at, place)
"""
# save_messages: → saved, for messages that are not in the ledger yet. Chats and members are created where they miss.
SAVE: Final = sql(f"""
    WITH clock AS MATERIALIZED (SELECT ledger.ledger_now() AS at),
    given AS MATERIALIZED (SELECT given.* FROM {_GIVEN}),
    pairs AS MATERIALIZED (
        SELECT DISTINCT ON (chat_id) chat_id, least(principal COLLATE "C", to_user_id COLLATE "C") AS first,
               greatest(principal COLLATE "C", to_user_id COLLATE "C") AS second
        FROM given WHERE NOT EXISTS (SELECT FROM ledger.chat WHERE chat.id = given.chat_id)
        ORDER BY chat_id),
    chats AS (
        INSERT INTO ledger.chat (id, first_user_id, second_user_id, created_at)
        SELECT chat_id, first, second, at FROM pairs CROSS JOIN clock
        ON CONFLICT DO NOTHING),
    members AS (
        INSERT INTO ledger.chat_member (chat_id, user_id, created_at)
        SELECT chat_id, unnest(ARRAY[first, second]), at FROM pairs CROSS JOIN clock
        ON CONFLICT DO NOTHING),
    messages AS (
        INSERT INTO ledger.chat_message (id, chat_id, client_msg_id, from_user_id, to_user_id, msg_type, body,
                                         producer_server_id, sent_at, accepted_at, saved_at)
        SELECT id, chat_id, client_id, principal, to_user_id, msg_type, body, producer, sent_at,
               coalesce(accepted_at, at), at
        FROM given CROSS JOIN clock ORDER BY place
        ON CONFLICT DO NOTHING
        RETURNING id),
    {rows.insert_saved("given JOIN messages USING (id)")}
    SELECT id, seq, saved_at FROM receipts
""")
EXISTING: Final = sql("""
    SELECT id, to_user_id, msg_type, body FROM ledger.chat_message WHERE id = ANY(CAST(:ids AS uuid[]))
""")


class BadMessage(Misuse):
    """The chat message is invalid.

    A field is missing, is too long, or has a value of the wrong type.
    """

    code = "bad_message"
    remedy = "Correct the field that the message names; docs/receipts.md describes the frames."


class Given(NamedTuple):
    """A message to save, and the name of the process that accepted it."""

    message: ChatMessage
    row: rows.Row
    producer: str | None


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message as its sender wrote it."""

    sender: str
    receiver: str
    client_msg_id: str
    body: str
    msg_type: str = "text"
    sent_ms: int | None = None  # by the sender's clock

    @property
    def id(self) -> uuid.UUID:
        return kinds.message_id(kinds.CHAT, self.sender, self.client_msg_id)

    @property
    def sha256(self) -> str:
        content = {"to": self.receiver, "msgType": self.msg_type, "body": self.body}
        return hashlib.sha256(canonical_json(content).encode()).hexdigest()

    @property
    def chat_id(self) -> uuid.UUID:
        return keyed_id("chat of", SEPARATOR.join(sorted((self.sender, self.receiver))))

    def check(self) -> None:
        """Raise BadMessage, or ContentRejected for a banned word."""
        for name, value in (
            ("clientMsgId", self.client_msg_id),
            ("from", self.sender),
            ("to", self.receiver),
            ("msgType", self.msg_type),
        ):
            if not is_id(value):
                limit = f"1 to {LONGEST_ID} characters without control characters"
                raise BadMessage(f"`{name}` must be text of {limit}.")
        if not isinstance(self.body, str) or "\x00" in self.body or not _is_utf8(self.body):
            raise BadMessage("`body` must be text without NUL characters and unpaired surrogates.")
        if len(self.body.encode()) > LONGEST_BODY:
            raise BadMessage(f"`body` has more than {LONGEST_BODY:,} bytes.")
        if self.sent_ms is not None and not (type(self.sent_ms) is int and 0 <= self.sent_ms <= LATEST_MS):
            raise BadMessage("`sendTs` must be a time in milliseconds since 1970.")
        lowered = self.body.casefold()
        if any(word.casefold() in lowered for word in settings.current().receipt_banned_words):
            raise ContentRejected

    def message(self) -> Message:
        """Return the message to accept."""
        fields: dict[str, str | bytes] = {
            "serverMsgId": str(self.id),
            "clientMsgId": self.client_msg_id,
            "fromUserId": self.sender,
            "toUserId": self.receiver,
            "msgType": self.msg_type,
            "body": self.body,
            "sendTs": "" if self.sent_ms is None else str(self.sent_ms),
            "producerServerId": producer(),
        }
        return Message(kinds.CHAT, self.id, self.sender, self.sha256, fields, self.client_msg_id)

    def row(self, accepted_at: datetime | None, *, policy: str, ordered: bool = True) -> rows.Row:
        """Return what the receipt of this message says."""
        return rows.Row(
            self.id, kinds.CHAT, self.sender, self.client_msg_id, self.sha256, accepted_at, policy, ordered=ordered
        )


def is_id(value: object) -> bool:
    """Return True if the value may be an id of a client: short text that can be stored and shown."""
    return isinstance(value, str) and 0 < len(value) <= LONGEST_ID and not NOT_IN_AN_ID.search(value)


def producer() -> str:
    """Return the name of this process, which an entry has to tell where it comes from."""
    return holder_of(os.getpid())


def read_entry(entry: Entry) -> ChatMessage:
    """Return the message of an entry; raise KeyError or ValueError if a field is missing or malformed."""
    fields = entry.fields
    sent = fields.get("sendTs")
    return ChatMessage(
        fields["fromUserId"],
        fields["toUserId"],
        fields["clientMsgId"],
        fields["body"],
        fields.get("msgType") or "text",
        int(sent) if sent else None,
    )


def read(_kind: str, entries: Sequence[Entry]) -> list[Given]:
    return [_read(entry) for entry in entries]


def row_of(_kind: str, entry: Entry) -> rows.Row:
    return _read(entry).row


def save_now(db: Session, message: ChatMessage, *, ordered: bool) -> Receipt:
    """Save a message without the receipt log, and return its receipt `saved`; raise IdempotencyConflict."""
    row = message.row(None, policy=COMMIT, ordered=ordered)
    given = [Given(message, row, producer())]
    (found,) = save(db, given, prepare(given))
    if isinstance(found, Rejected):
        raise IdempotencyConflict(message.id)
    if found.is_new:
        return rows.receipt_of(row, found, settings.current().receipt_promise_seconds)
    known = rows.find(connection_of(db), message.id, level=Level.SAVED)
    assert known is not None, "a saved message has a receipt"
    return replace(known, duplicate=True)


def prepare(given: Sequence[Given]) -> Mapping[str, Any]:
    """Return the parameters of SAVE."""
    messages = [each.message for each in given]
    return rows.values_of([each.row for each in given], settings.current().receipt_promise_seconds) | {
        "chat_ids": array_of_ids(message.chat_id for message in messages),
        "tos": array(message.receiver for message in messages),
        "msg_types": array(message.msg_type for message in messages),
        "bodies": array(message.body for message in messages),
        "producers": array(each.producer for each in given),
        "sent_ats": array(_time(message.sent_ms) for message in messages),
    }


def save(db: Session, given: Sequence[Given], prepared: Mapping[str, Any]) -> list[SaveResult]:
    """Write messages, their chats and members, and their receipts into the ledger."""
    new = {id_: Saved(seq, saved_at) for id_, seq, saved_at in connection_of(db).execute(SAVE, prepared)}
    results: list[SaveResult | None] = []
    for each in given:
        results.append(new.pop(each.row.id, None))  # only the first of two with one id is new
    known = [each for each, result in zip(given, results, strict=True) if result is None]
    existing = iter(_compare(db, known) if known else ())
    return [next(existing) if result is None else result for result in results]


def _compare(db: Session, known: Sequence[Given]) -> list[SaveResult]:
    """Return for messages that exist already whether they are the same, with the receipt that they have."""
    ids = array_of_ids(each.row.id for each in known)
    stored = {id_: rest for id_, *rest in connection_of(db).execute(EXISTING, {"ids": ids})}
    are_same = [_is_same(each.message, stored[each.row.id]) for each in known]
    same = {each.row.id: each.row for each, is_same in zip(known, are_same, strict=True) if is_same}
    receipts = rows.insert(db, list(same.values()), settings.current().receipt_promise_seconds)
    return [
        receipts[each.row.id]._replace(is_new=False)
        if is_same
        else Rejected(IdempotencyConflict.code, IdempotencyConflict(each.row.id).message)
        for each, is_same in zip(known, are_same, strict=True)
    ]


def _is_same(message: ChatMessage, stored: Sequence[str]) -> bool:
    return [message.receiver, message.msg_type, message.body] == stored


def _read(entry: Entry) -> Given:
    message = read_entry(entry)
    row = message.row(from_milliseconds(entry.fields["createdAtMs"]), policy=AOF_ALWAYS)
    return Given(message, row, entry.fields.get("producerServerId") or None)


def _time(milliseconds: int | None) -> str | None:
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat()


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
