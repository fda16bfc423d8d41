"""Entries that no saver can save, as another program, an older version or an operator may have added them by hand."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from receipts import kinds

Fields = Mapping[Any, str | bytes]
NOT_UTF8 = b"\xff"
# Longer than an index row may be, and not compressible.
TOO_LONG = "".join(chr(0x4E00 + n * 7907 % 20_000) for n in range(9000))
CHAT: dict[str, str] = {
    "fromUserId": "hand",
    "toUserId": "bob",
    "msgType": "text",
    "body": "text",
    "sendTs": "",
    "producerServerId": "hand",
    "createdAtMs": "1700000000000",
}
PAYLOAD = '{"n": 1}'
TASK: dict[str, Any] = {
    "type": "test.insert",
    "queue": None,
    "priority": None,
    "run_at": None,
    "partition_key": None,
    "max_attempts": None,
    "context": {},
    "notify": None,
}
COMMON = {"principal": "hand", "clientId": "", "sha256": "0", "createdAtMs": "1700000000000"}


def chat(**fields: str | bytes) -> Fields:
    return {**CHAT, "clientMsgId": str(uuid.uuid4()), **fields}


def without(field: str) -> Fields:
    return {name: value for name, value in chat().items() if name != field}


def task(written: str | None = None, **fields: str | bytes) -> Fields:
    given = json.dumps(TASK) if written is None else written
    return COMMON | {"id": str(uuid.uuid4()), "key": "", "payload": PAYLOAD, "task": given, **fields}


def changed(**fields: Any) -> Fields:
    return task(json.dumps({**TASK, **fields}))


def document(**fields: str | bytes) -> Fields:
    return {"name": "a.txt", "mediaType": "", "content": "text", **COMMON, "id": str(uuid.uuid4()), **fields}


BAD: dict[str, list[Fields]] = {
    kinds.CHAT: [
        {"other": "fields"},
        {"NUL \0 in a name": "1"},
        {NOT_UTF8: "1"},
        *(without(name) for name in ("body", "createdAtMs", "fromUserId", "toUserId", "clientMsgId")),
        *(chat(**{name: NOT_UTF8}) for name in ("fromUserId", "toUserId", "clientMsgId", "body", "msgType")),
        *(chat(**{name: "\0"}) for name in ("fromUserId", "toUserId", "clientMsgId", "body", "producerServerId")),
        *(chat(createdAtMs=time) for time in ("yesterday", "", "-1", "9" * 18, "9" * 400, "9" * 5000)),
        *(chat(sendTs=time) for time in ("yesterday", "9" * 18, "9" * 400, "9" * 5000)),
        chat(clientMsgId=TOO_LONG),
    ],
    kinds.TASKS: [
        {"other": "fields"},
        *(task(written) for written in ("", "{", "5", "null", "[]", '"text"', "{}", "[" * 100_000)),
        *(task(payload=text) for text in ("", "{", '{"n": 1} {}', "1e400", '{"a": [1, -1.5E+400]}', "\0", NOT_UTF8)),
        *(task(payload=PAYLOAD.replace("1", number)) for number in ("NaN", "-Infinity", "1e400", "9" * 5000)),
        *(task(payload=PAYLOAD.replace("n", name)) for name in (r"\ud800", r"\u0000", "\n")),
        *(task(payload="[" * deep + "]" * deep) for deep in (65, 100_000)),
        task(payload=json.dumps(dict.fromkeys(map(str, range(10_001))))),
        task(payload=json.dumps("x" * 1_100_000)),
        *(task(key=text) for text in ("\0", "\x1f", "x" * 501, TOO_LONG)),
        task(json.dumps({**TASK, "\ud800": 1})),  # an error message would quote the name
        task(id="not a UUID"),
        *(task(**{name: "\0"}) for name in ("sha256", "principal", "clientId")),
        task(createdAtMs="9" * 400),
        changed(type="no.such.type"),
        *(changed(**{name: {}}) for name in ("type", "priority", "partition_key", "notify")),
        *(changed(**{name: "x"}) for name in ("queue", "priority", "run_at", "max_attempts", "context", "notify")),
        changed(max_attempts=10**30),
        changed(type="no.such.type", batch="x"),
        changed(unknown="field"),
    ],
    kinds.DOCUMENTS: [
        {"other": "fields"},
        *(document(name=name) for name in ("", "\0", NOT_UTF8, "x" * 100_000)),
        *(document(principal=text) for text in ("\0", NOT_UTF8, TOO_LONG)),
        document(createdAtMs="9" * 400),
        document(id="not a UUID"),
    ],
}
