"""The API behind a real server: early rejections, disconnecting clients, and what is logged."""

from __future__ import annotations

import json
import logging
import select
import socket
import time
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from api import http_protocol, workflows
from api.error_middleware import SECURITY_HEADERS
from tasks.submission.json_lines import LINE_LIMIT
from tests.api.callers import FLAKY, make_token
from tests.api.server import Server
from tests.servers import ServersOfTests, wait_until
from tests.tasks import work


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


# half-open connections


def test_connections_that_send_no_complete_head_are_closed_in_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(http_protocol, "MOST_WITHOUT_HEAD", 1000)
    with ExitStack() as opened:
        clients = [opened.enter_context(server.connect()) for _ in range(300)]
        for number, client in enumerate(clients):
            client.sendall((b"", b"POST /api/tasks HTTP/1.1\r\nHost: a", b"\r\n")[number % 3])
        started_at = time.monotonic()
        for client in clients:
            assert client.recv(10) in (b"", b"HTTP/1.1 4")  # 408 if anything was sent
        assert time.monotonic() - started_at < 10
    wait_until(lambda: not server.uvicorn.server_state.connections, "no connection is left")


def test_a_client_that_sends_a_byte_now_and_then_gains_no_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 1.0)
    with server.connect() as client:
        started_at = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - started_at < 10:
                client.sendall(b"X")
                if select.select([client], [], [], 0.05)[0]:
                    break
        assert 0.9 < time.monotonic() - started_at < 5
        status, answer = _answer(client)
    assert (status, answer["error"]["code"]) == (408, "request_timeout")


def test_a_body_that_is_never_finished_is_answered_408_and_submits_nothing(
    server: Server, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", 1.0)
    with server.connect() as client:
        client.sendall(_head("/api/tasks", token, "Content-Length: 1000") + b'{"type":')
        status, answer = _answer(client)
        assert (status, answer["error"]["code"]) == (408, "request_timeout")
        assert client.recv(10) == b""
    wait_until(lambda: not server.uvicorn.server_state.tasks, "the request has ended")
    assert work.rows() == []


def test_a_large_body_that_arrives_steadily_is_not_cut_off(
    server: Server, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", 0.5)
    body = json.dumps({"type": FLAKY, "payload": "x" * 100_000}).encode()
    with server.connect() as client:
        client.sendall(_head("/api/tasks", token, f"Content-Length: {len(body)}"))
        pieces = [body[at : at + 10_000] for at in range(0, len(body), 10_000)]
        for piece in pieces:  # ten pieces in one second
            client.sendall(piece)
            time.sleep(0.1)
        assert _answer(client)[0] == 202


def test_a_client_that_does_not_finish_a_rejected_body_is_disconnected(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "REST_SECONDS", 0.5)
    with server.connect() as client:
        client.sendall(_head("/api/tasks", "celeriac_" + "A" * 43, "Content-Length: 1000"))
        assert _answer(client)[0] == 401
        client.sendall(b"x")  # stops uvicorn's own timer
        assert client.recv(10) == b""


def test_a_second_request_on_a_connection_has_the_same_limits(
    server: Server, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.connect() as client:
        for _ in range(2):
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            assert _answer(client)[0] == 200
        monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 1.0)
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert _answer(client)[0] == 200
        client.sendall(b"GET /healthz")
        assert _answer(client)[0] == 408


def test_hundreds_of_half_open_connections_do_not_keep_others_from_being_served(
    server: Server, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MOST_WITHOUT_HEAD", 200)
    body = json.dumps({"type": FLAKY}).encode()
    with ExitStack() as opened:
        clients = [opened.enter_context(server.connect()) for _ in range(400)]
        with server.connect() as client:
            client.sendall(_head("/api/tasks", token, f"Content-Length: {len(body)}") + body)
            assert _answer(client)[0] == 202
        assert clients[0].recv(1) == b""  # the oldest ones are closed first
        wait_until(
            lambda: len(server.uvicorn.server_state.connections) <= http_protocol.MOST_WITHOUT_HEAD, "most are closed"
        )
        clients[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert _answer(clients[-1])[0] == 200


# invalid HTTP


@pytest.mark.parametrize("path", ["/healthz", "/api/tasks"])
def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(server: Server, token: str, path: str) -> None:
    smuggled = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
    with server.connect() as client:
        head = _head(path, token, "Content-Length: 5", "Transfer-Encoding: chunked")
        client.sendall(head + b"0\r\n\r\n" + smuggled)
        status, answer = _answer(client)
        assert (status, answer["error"]["code"]) == (400, "bad_request")
        assert "Content-Length and Transfer-Encoding" in answer["error"]["message"]
        assert client.recv(10) == b""  # the second request is not answered
    assert work.rows() == []


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",  # no Host
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nBad Header: x\r\n\r\n",
        b"POST /api/tasks HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /api/tasks HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET /" + b"x" * 100_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
    ],
    ids=range(7),
)
def test_invalid_http_is_answered_like_every_other_error(server: Server, request_: bytes) -> None:
    with server.connect() as client:
        client.sendall(request_)
        head, _, body = _read_all(client).partition(b"\r\n\r\n")
    lines = head.decode().lower().splitlines()
    assert lines[0] == "http/1.1 400 bad request"
    assert {"content-type: application/json", "connection: close"} <= set(lines)
    assert {f"{name}: {value}".lower() for name, value in SECURITY_HEADERS.items()} <= set(lines)
    assert json.loads(body)["error"] == {"code": "bad_request", "message": "The request is not valid HTTP."}


def _read_all(client: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionError):
        while part := client.recv(65_536):
            received += part
    return received


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
