"""Clients of the chat with a real WebSocket library, and API processes that can be killed."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin, Subprotocol

from api import chat
from child_process import ChildProcess
from receipts import frames
from settings import ROOT
from tests.servers import wait_until

SECONDS = 20
FIELDS = ["type", "ackType", "from", "to", "clientMsgId", "serverMsgId", "body", "code"]
UVICORN = (
    *(sys.executable, "-m", "uvicorn", "api.app:app", "--port=0", "--http=api.http_protocol:GuardedProtocol"),
    *("--ws=api.websocket_protocol:GuardedWebSocket", "--ws-max-size=1048576", "--ws-per-message-deflate=false"),
)
Frame = dict[str, Any]


class ChatClient:
    """A connection to the chat, used as a context manager."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.cursor: str | None = None  # of the last CURSOR that was read

    @classmethod
    @contextmanager
    def open(cls, port: int, token: str | None, *, cursor: str | None = None, **options: Any) -> Iterator[ChatClient]:
        with _connect(port, token, f"/ws/chat?cursor={cursor}" if cursor else "/ws/chat", **options) as connection:
            yield cls(connection)

    def send(self, to: str, client_msg_id: str, body: str = "hello", **more: Any) -> None:
        given = {"type": frames.SINGLE_CHAT, "to": to, "clientMsgId": client_msg_id, "body": body, **more}
        self.connection.send(json.dumps(given))

    def next(self) -> Frame:
        """Return the next frame, of whatever type."""
        frame: Frame = json.loads(self.connection.recv(timeout=SECONDS))
        assert list(frame) == FIELDS
        if frame["type"] == frames.CURSOR:
            self.cursor = frame["body"]
        return frame

    def read(self) -> Frame:
        """Return the next frame that is no CURSOR."""
        while (frame := self.next())["type"] == frames.CURSOR:
            pass
        return frame

    def read_until_cursor(self) -> list[Frame]:
        """Return the frames before the next CURSOR."""
        found = []
        while (frame := self.next())["type"] != frames.CURSOR:
            found.append(frame)
        return found

    def read_many(self, count: int) -> list[Frame]:
        return [self.read() for _ in range(count)]

    def expect_error(self, code: str) -> str:
        frame = self.read()
        assert (frame["type"], frame["code"]) == (frames.ERROR, code), frame
        sentence: str = frame["body"]
        assert sentence.endswith("."), sentence
        return sentence

    def expect_ack(self, level: str, client_msg_id: str) -> Frame:
        """Return the receipt of the next frame, which must be an ACK."""
        frame = self.read()
        assert (frame["type"], frame["ackType"], frame["clientMsgId"]) == (frames.ACK, level, client_msg_id), frame
        receipt: Frame = json.loads(frame["body"])
        assert (receipt["level"], receipt["id"]) == (level, frame["serverMsgId"])
        return receipt

    def close_code(self) -> int | None:
        """Read until the server closes the connection, and return the code."""
        try:
            while True:
                self.next()
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd else None


def ids(found: list[Frame]) -> list[str]:
    return [frame["clientMsgId"] for frame in found]


def refused(port: int, token: str | None, path: str = "/ws/chat", **options: Any) -> tuple[int, str]:
    """Return status and code of a handshake that is refused."""
    with pytest.raises(InvalidStatus) as failed, _connect(port, token, path, **options):
        pass
    response = failed.value.response
    return response.status_code, json.loads(response.body or b"{}")["error"]["code"]


def _connect(port: int, token: str | None, path: str, **options: Any) -> ClientConnection:
    headers = [("Authorization", f"Bearer {token}")] if token is not None else []
    headers += options.pop("headers", [])
    if "origin" in options:
        options["origin"] = Origin(options["origin"])
    if "subprotocols" in options:
        options["subprotocols"] = [Subprotocol(each) for each in options["subprotocols"]]
    options.setdefault("close_timeout", 1)  # unread frames hide the answer to a close frame
    made = connect(f"ws://127.0.0.1:{port}{path}", additional_headers=headers, proxy=None, compression=None, **options)
    assert isinstance(made, ClientConnection)
    return made


class ApiProcess:
    """uvicorn in a process of its own."""

    def __init__(self, folder: Path, **variables: str) -> None:
        folder.mkdir()
        self.child = ChildProcess(
            "api",
            [*UVICORN, "--log-level=info"],
            log=folder / "log",
            environment={**os.environ, **variables},
            cwd=ROOT,
        )

    @property
    def port(self) -> int:
        wait_until(lambda: self._found(r"running on http://127.0.0.1:(\d+)"), "uvicorn listens", seconds=SECONDS)
        return int(self._found(r"running on http://127.0.0.1:(\d+)")[0])

    def _found(self, pattern: str) -> list[str]:
        assert self.child.exit_code() is None, self.child.output()
        return re.findall(pattern, self.child.output())


StartApi = Callable[..., ApiProcess]


def connections(user: str) -> list[Any]:
    """Return the connections of a user to the servers in this process."""
    channel = frames.channel_of(user)
    return [each for chats in list(chat._by_loop.values()) for each in chats.hub._sockets.get(channel, ())]


def distinct(found: list[str]) -> list[str]:
    """Drop repetitions, as a client does."""
    return list(dict.fromkeys(found))


def read_all(client: ChatClient) -> tuple[list[str], int | None]:
    """Read until the connection is closed. Return the ids of the messages, and the code with which it was closed."""
    found: list[str] = []
    try:
        while True:
            found.append(client.read()["clientMsgId"])
    except ConnectionClosed as closed:
        return found, closed.rcvd.code if closed.rcvd else None
