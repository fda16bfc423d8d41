"""The API behind a real server: early rejections, disconnecting clients, and what is logged."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from api import workflows
from api.app import app
from tasks.submission.json_lines import LINE_LIMIT
from tests.api.callers import FLAKY, make_token
from tests.servers import ServersOfTests, wait_until
from tests.tasks import work


class Server:
    """uvicorn in a thread of this process."""

    def __init__(self) -> None:
        self.uvicorn = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, log_level="trace", lifespan="off"))
        self.thread = threading.Thread(target=self.uvicorn.run)

    def start(self) -> None:
        self.thread.start()
        wait_until(lambda: self.uvicorn.started, "uvicorn listens", seconds=20)

    def stop(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join()

    def connect(self) -> socket.socket:
        port = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        return socket.create_connection(("127.0.0.1", port), timeout=20)


@pytest.fixture
def server(stack: ServersOfTests) -> Iterator[Server]:
    server = Server()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def token(stack: ServersOfTests) -> str:
    return make_token("ci")


def test_a_task_is_submitted_over_a_socket_and_no_token_is_logged(
    server: Server, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(1)
    body = json.dumps({"type": FLAKY}).encode()
    with server.connect() as client:
        client.sendall(_head("/api/tasks", token, f"Content-Length: {len(body)}") + body)
        status, made = _answer(client)
    assert (status, made["created"]) == (202, True)
    assert work.rows("id::text") == [(made["taskId"],)]
    logged = caplog.text + str([vars(record) for record in caplog.records])
    assert "POST /api/tasks" in logged
    assert any(record.levelno < logging.DEBUG for record in caplog.records)
    assert token not in logged


def test_a_declared_length_that_is_too_large_is_answered_before_the_body_arrives(server: Server, token: str) -> None:
    with server.connect() as client:
        client.sendall(_head("/api/tasks", token, f"Content-Length: {LINE_LIMIT + 1}"))
        status, answer = _answer(client)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


def test_an_unknown_token_is_answered_before_the_body_arrives(server: Server) -> None:
    with server.connect() as client:
        client.sendall(_head("/api/tasks", "celeriac_" + "A" * 43, "Content-Length: 1000"))
        status, answer = _answer(client)
    assert (status, answer["error"]["code"]) == (401, "unauthenticated")


def test_an_endless_body_is_rejected_at_the_limit(server: Server, token: str) -> None:
    chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
    with server.connect() as client:
        client.sendall(_head("/api/tasks", token, "Transfer-Encoding: chunked"))
        for _ in range(LINE_LIMIT // 65_536 + 1):
            client.sendall(chunk)
        status, answer = _answer(client)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert work.rows() == []


def test_a_client_that_disconnects_while_sending_submits_nothing(
    server: Server, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    with server.connect() as client:
        client.sendall(_head("/api/tasks", token, "Content-Length: 1000") + b'{"type":')
        wait_until(lambda: server.uvicorn.server_state.tasks, "the request is being read")
    wait_until(lambda: not server.uvicorn.server_state.tasks, "the request has ended")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert work.rows() == []


def test_a_waiting_request_ends_when_its_client_disconnects(
    server: Server, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflows, "TYPE", FLAKY)
    with server.connect() as client:
        client.sendall(_head("/api/workflows/apply?wait=60", token, "Content-Length: 2") + b"{}")
        wait_until(work.rows, "the task is in the ledger")
        assert server.uvicorn.server_state.tasks
    wait_until(lambda: not server.uvicorn.server_state.tasks, "the request has ended", seconds=10)


def _head(path: str, token: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: api", f"Authorization: Bearer {token}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def _answer(client: socket.socket) -> tuple[int, Any]:
    with client.makefile("rb") as stream:
        status = int(stream.readline().split()[1])
        length = 0
        while (line := stream.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        return status, json.loads(stream.read(length))
