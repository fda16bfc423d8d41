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
TASK: dict[str, Any] = {
    "type": "test.insert",
    "payload": {"n": 1},
    "key": None,
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


def task(written: str | None = None, **fields: str) -> Fields:
    given = json.dumps(TASK) if written is None else written
    return COMMON | {"id": str(uuid.uuid4()), "task": given, **fields}


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
        task(json.dumps(TASK).replace('"n": 1', '"n": NaN')),
        task(json.dumps(TASK).replace('"n": 1', '"n": 1e400')),
        task(json.dumps(TASK).replace('"n": 1', f'"n": {"9" * 5000}')),
        task(json.dumps(TASK).replace('"n"', r'"\ud800"')),
        task(json.dumps(TASK).replace('"n"', r'"\u0000"')),
        task(json.dumps({**TASK, "\ud800": 1})),  # an error message would quote the name
        task(id="not a UUID"),
        *(task(**{name: "\0"}) for name in ("sha256", "principal", "clientId")),
        task(createdAtMs="9" * 400),
        changed(type="no.such.type"),
        *(changed(**{name: {}}) for name in ("type", "key", "priority", "partition_key", "notify")),
        *(changed(**{name: "x"}) for name in ("queue", "priority", "run_at", "max_attempts", "context", "notify")),
        changed(max_attempts=10**30),
        changed(type="no.such.type", batch="x"),
        changed(key=TOO_LONG),
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
