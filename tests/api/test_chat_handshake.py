"""Who may open the chat, with a real WebSocket client: tokens, scopes, origins, subprotocols and cursors."""

from __future__ import annotations

import logging

import pytest

from api import chat, http_protocol, tokens
from api.tokens import Scope
from api.websocket_authorization import is_own_origin
from models.engine import engine
from tests.api.callers import make_token
from tests.api.chat_clients import ChatClient, refused
from tests.api.chat_fixtures import Configure
from tests.api.server import Server

UNKNOWN = "celeriac_" + "A" * 43


def test_a_handshake_without_a_valid_token_is_refused(server: Server, token: str) -> None:
    assert refused(server.port, None) == (401, "unauthenticated")
    assert refused(server.port, UNKNOWN) == (401, "unauthenticated")
    assert refused(server.port, f"{token}x") == (401, "unauthenticated")
    assert refused(server.port, token, headers=[("Authorization", f"Bearer {token}")]) == (401, "unauthenticated")


def test_a_token_in_the_address_is_not_used(server: Server, token: str) -> None:
    for name in ("token", "access_token", "authorization"):
        assert refused(server.port, None, f"/ws/chat?{name}={token}") == (401, "unauthenticated")


def test_a_token_without_the_scope_is_refused(server: Server) -> None:
    others = [scope for scope in Scope if scope is not Scope.CHAT]
    assert refused(server.port, make_token("cid", *others)) == (403, "forbidden")


def test_a_revoked_token_is_refused(server: Server, token: str) -> None:
    with engine().begin() as connection:
        tokens.revoke(connection, "ann")
    assert refused(server.port, token) == (401, "unauthenticated")


def test_another_path_is_refused_before_the_handshake(server: Server, token: str) -> None:
    for path in ("/", "/ws", "/ws/chat/", "/ws/other", "/api/tasks", "/healthz"):
        assert refused(server.port, token, path) == (404, "not_found")


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://127.0.0.1", "http://127.0.0.1:1", "null", "http://127.0.0.1.evil.example", ""],
)
def test_a_page_of_another_site_is_refused(server: Server, token: str, configure: Configure, origin: str) -> None:
    configure(RECEIPT_ORIGINS="https://app.example.com")
    assert refused(server.port, token, origin=origin) == (403, "foreign_origin")


def test_pages_of_this_host_and_of_listed_origins_are_admitted(
    server: Server, token: str, configure: Configure
) -> None:
    configure(RECEIPT_ORIGINS="https://app.example.com,http://localhost:3000/")
    listed = ("https://app.example.com", "https://APP.example.com:443", "http://localhost:3000")
    for origin in (*listed, f"http://127.0.0.1:{server.port}", f"https://127.0.0.1:{server.port}"):
        with ChatClient.open(server.port, token, origin=origin) as client:
            client.read_until_cursor()


@pytest.mark.parametrize(
    ("origin", "host", "is_own"),
    [
        ("https://chat.example.com", "chat.example.com", True),  # behind a proxy that ends TLS
        ("https://chat.example.com", "chat.example.com:443", True),
        ("http://chat.example.com:8000", "chat.example.com:8000", True),
        ("https://chat.example.com", "chat.example.com:8000", False),
        ("https://chat.example.com.", "chat.example.com", False),
        ("ftp://chat.example.com", "chat.example.com", False),
        ("chat.example.com", "chat.example.com", False),
    ],
)
def test_the_host_of_a_request_decides_which_origin_is_its_own(origin: str, host: str, is_own: bool) -> None:
    assert is_own_origin(origin, host) is is_own


def test_a_browser_sends_its_token_as_a_subprotocol_that_is_neither_selected_nor_logged(
    server: Server, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(1)
    offered = ["celeriac.chat", f"celeriac.bearer.{token}"]
    with ChatClient.open(server.port, None, subprotocols=offered) as client:
        assert client.connection.subprotocol == "celeriac.chat"
        client.send("bob", "1")
        client.expect_ack("saved", "1")
    ours = [record for record in caplog.records if not record.name.startswith("websockets")]  # those are the client's
    logged = str([vars(record) for record in ours])
    assert any(record.levelno < logging.DEBUG for record in ours)
    assert token not in logged


def test_a_subprotocol_with_a_token_needs_the_one_that_can_be_selected(server: Server, token: str) -> None:
    assert refused(server.port, None, subprotocols=[f"celeriac.bearer.{token}"]) == (401, "unauthenticated")
    offered = ["celeriac.chat", f"celeriac.bearer.{token}"]
    assert refused(server.port, token, subprotocols=offered) == (401, "unauthenticated")
    assert refused(server.port, None, subprotocols=[*offered, f"celeriac.bearer.{UNKNOWN}"])[0] == 401


@pytest.mark.parametrize("cursor", ["x", "-1", "1.0", "9" * 19, "9" * 100, "٣", ""])
def test_a_cursor_that_is_not_a_number_is_refused_instead_of_losing_history(
    server: Server, token: str, cursor: str
) -> None:
    assert refused(server.port, token, f"/ws/chat?cursor={cursor}") == (400, "bad_cursor")


def test_a_cursor_of_another_server_is_reported_instead_of_losing_history(server: Server, token: str) -> None:
    with ChatClient.open(server.port, token, cursor=str(2**62)) as client:
        client.expect_error("bad_cursor")
        client.read_until_cursor()


def test_a_user_cannot_open_connections_without_end(
    server: Server, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "MOST_OF_ONE_USER", 1)
    with ChatClient.open(server.port, token), ChatClient.open(server.port, make_token("bob", Scope.CHAT)):
        assert refused(server.port, token) == (429, "too_many_connections")


def test_a_connection_is_not_cut_by_the_time_limits_of_http_requests(
    server: Server, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "BODY_SECONDS", 0.05)
    with ChatClient.open(server.port, token) as client:
        for number in range(30):
            client.send("bob", str(number))
            client.expect_ack("saved", str(number))
            client.connection.ping().wait(0.01)
        assert client.connection.ping().wait(10)
