"""Access is denied by default. `test_authorization_matrix.py` tries every route with every kind of token."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from api import tokens
from api.authorization import require_scopes_on_all_routes
from api.error_middleware import SECURITY_HEADERS
from models.engine import engine
from tests.api.callers import Callers, expect_error, make_token
from tests.models.moving_clock import move_clock
from tests.servers import ServersOfTests


def test_an_application_with_a_route_that_declares_no_scope_does_not_start() -> None:
    careless = FastAPI(openapi_url=None)
    require_scopes_on_all_routes(careless)
    careless.get("/api/secrets")(lambda: "all of them")
    with pytest.raises(RuntimeError, match="The route /api/secrets declares no scope"):
        require_scopes_on_all_routes(careless)


def test_without_a_token_even_unknown_addresses_are_401(callers: Callers, client: TestClient) -> None:
    caller = callers()
    for path in (
        "/nothing",
        "/docs/",
        "/docs/nothing.js",
        "/openapi.yaml",
        "/healthz/",
        "/api/tasks/",
        "http://testserver//healthz",
    ):
        expect_error(client.get(path), 401, "unauthenticated")
        expect_error(caller.get(path), 404, "not_found")


def test_an_unknown_or_malformed_token_is_rejected(client: TestClient) -> None:
    unknown = "celeriac_" + "A" * 43
    malformed = ("", "Bearer", "Bearer ", "Basic Y2VsZXJpYWM6eA==", "Bearer x", f"Basic {unknown}")
    for header in (*malformed, f"Bearer {unknown}"):
        answer = client.get("/api/tasks/1", headers={"Authorization": header})
        expect_error(answer, 401, "unauthenticated")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_token_in_the_address_is_ignored(client: TestClient, callers: Callers) -> None:
    token = callers().token
    expect_error(client.get(f"/api/tasks/1?token={token}&access_token={token}"), 401, "unauthenticated")


def test_two_authorization_headers_are_rejected(client: TestClient, callers: Callers) -> None:
    bearer = f"Bearer {callers().token}"
    twice = [("Authorization", bearer), ("Authorization", bearer)]
    expect_error(client.get("/api/tasks/1", headers=twice), 401, "unauthenticated")


def test_a_revoked_token_is_rejected_at_once(callers: Callers) -> None:
    caller = callers()
    expect_error(caller.get("/api/tasks/1"), 404, "unknown_task")
    with engine().begin() as connection:
        tokens.revoke(connection, caller.name)
    assert expect_error(caller.get("/api/tasks/1"), 401, "unauthenticated") == "The token was revoked."


def test_an_expired_token_is_rejected_by_the_ledgers_clock(callers: Callers, stack: ServersOfTests) -> None:
    caller = callers(expires_in=timedelta(days=30))
    expect_error(caller.get("/api/tasks/1"), 404, "unknown_task")
    with stack.cluster.superuser.begin() as superuser:
        move_clock(superuser, timedelta(days=30))
    assert expect_error(caller.get("/api/tasks/1"), 401, "unauthenticated") == "The token has expired."


@pytest.mark.parametrize("path", ["/ws/chat", "/api/tasks", "/healthz", "/"])
def test_a_websocket_cannot_bypass_the_token_check(client: TestClient, path: str) -> None:
    with pytest.raises(WebSocketDisconnect), client.websocket_connect(path):
        raise AssertionError("The WebSocket was accepted.")


def test_every_response_has_the_security_headers(client: TestClient, callers: Callers) -> None:
    for answer in (client.get("/healthz"), client.get("/nothing"), callers().get("/api/tasks/1"), callers().submit()):
        assert {name: answer.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS


def test_no_token_is_logged(
    client: TestClient, callers: Callers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    caller, unknown = callers(), "celeriac_" + "Z" * 43
    assert caller.submit({"fail": 1}).status_code == 202
    client.get("/api/tasks/1", headers={"Authorization": f"Bearer {unknown}"})
    monkeypatch.setattr(tokens, "LOOK_UP", None)  # makes the look-up fail with an unexpected error
    expect_error(caller.get("/api/tasks/1"), 500, "internal")
    assert "A request failed." in caplog.text
    for secret in (caller.token, unknown):
        assert secret not in caplog.text


def test_a_new_token_with_an_old_name_keeps_the_principal_and_the_old_secret_stays_rejected(callers: Callers) -> None:
    caller = callers(name="ci")
    first = caller.submit({"n": 1}, key="k").json()
    with engine().begin() as connection:
        tokens.revoke(connection, "ci")
    caller.token, old = make_token("ci"), caller.token
    assert caller.submit({"n": 1}, key="k").json() == {**first, "created": False}
    caller.token = old
    expect_error(caller.get("/api/tasks/1"), 401, "unauthenticated")
