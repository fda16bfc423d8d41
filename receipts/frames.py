"""The frames of a chat over WebSocket, and how processes send them to a user who is connected to another process.

    {"type", "ackType", "from", "to", "clientMsgId", "serverMsgId", "body", "code"}

    SINGLE_CHAT    in: a message to send; out: a message for this user
    ACK            the message of the sender is `accepted` or `saved`; `body` is the signed receipt, as JSON
    ERROR          the message was not accepted, or was rejected; `code` says why, `body` is a sentence
    CURSOR         out only: everything up to `body` was sent; a client that reconnects with `?cursor=` gets the rest

A process that saves or delivers publishes frames on the channel of the user. Publishing is best effort: each connection
also reads from the ledger what it has missed (`chat_history.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import settings
from models.receipts import Level
from receipts.chat_messages import ChatMessage, is_id
from receipts.receipt import Receipt
from receipts.signing import sign

SINGLE_CHAT: Final = "SINGLE_CHAT"
ACK: Final = "ACK"
ERROR: Final = "ERROR"
CURSOR: Final = "CURSOR"
SAVED: Final = Level.SAVED.value


def frame(type_: str, **fields: Any) -> dict[str, Any]:
    """Return a frame with all of its fields."""
    named = {"ackType": None, "from": None, "to": None, "clientMsgId": None, "serverMsgId": None}
    return {"type": type_, **named, "body": None, "code": None, **fields}


def message_frame(message: ChatMessage) -> dict[str, Any]:
    return frame(SINGLE_CHAT, **_names(message), body=message.body)


def receipt_frame(message: ChatMessage, receipt: Receipt) -> dict[str, Any]:
    """Return the frame for the sender. `receipt` is not signed yet: the process of the connection signs it."""
    if receipt.level is Level.REJECTED:
        return frame(ERROR, **_names(message), body=receipt.reason, code=receipt.code, receipt=receipt.fields())
    return {**acknowledgement(message, receipt.level), "receipt": receipt.fields()}


def acknowledgement(message: ChatMessage, level: Level) -> dict[str, Any]:
    """Return an ACK without a receipt."""
    return frame(ACK, **_names(message), ackType=level.value)


def sign_receipt(frame_: Mapping[str, Any]) -> dict[str, Any]:
    """Return the frame as a client gets it: without the field `receipt`, which an ACK has in its body, signed."""
    shown = {name: value for name, value in frame_.items() if name != "receipt"}
    if shown["type"] == ACK and "receipt" in frame_:
        shown["body"] = encode(sign(frame_["receipt"]))
    return shown


def error_frame(code: str, sentence: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the answer to a message that was not accepted. `given` is the frame of the client."""
    found = given or {}
    names = {name: found.get(name) for name in ("to", "clientMsgId")}
    return frame(ERROR, **{k: v if is_id(v) else None for k, v in names.items()}, body=sentence, code=code)


def cursor_frame(cursor: int) -> dict[str, Any]:
    return frame(CURSOR, body=str(cursor))


def channel_of(user: str) -> str:
    """Return the channel on which the frames of a user are published."""
    return f"{settings.current().ledger_schema}:push:{user}"


def published(user: str, frame_: Mapping[str, Any]) -> list[bytes]:
    """Return a channel and a frame as PUBLISH needs them, or raise UnicodeEncodeError for text that is not Unicode."""
    return [channel_of(user).encode(), encode(frame_).encode()]


def encode(frame_: Mapping[str, Any]) -> str:
    return json.dumps(frame_, ensure_ascii=False, separators=(",", ":"))


def _names(message: ChatMessage) -> dict[str, Any]:
    return {
        "from": message.sender,
        "to": message.receiver,
        "clientMsgId": message.client_msg_id,
        "serverMsgId": str(message.id),
    }
