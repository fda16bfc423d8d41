"""Deny by default: nobody gets in without a token, and no token gets further than its scopes."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from api import tokens
from api.app import app
from api.authorization import OPEN, needed, require_scopes
from api.error_middleware import HEADERS
from api.tokens import Scope
from models.engine import engine
from tests.api.callers import Callers, make_token, refused
from tests.models.moving_clock import move_clock
from tests.servers import ServersOfTests

ROUTES: list[tuple[str, str, APIRoute]] = [
    (method, context.path or "", context.original_route)
    for context in iter_route_contexts(app.routes)
    if isinstance(context.original_route, APIRoute)
    for method in sorted(context.original_route.methods or ())
]
CLOSED = [route for route in ROUTES if route[1] not in OPEN]


def test_every_route_of_the_application_is_walked() -> None:
    assert len(ROUTES) == len(list(iter_route_contexts(app.routes)))
    assert {path for _, path, _ in ROUTES} > OPEN
    assert {"/api/tasks", "/api/workflows/apply", "/api/knowledge/search"} <= {path for _, path, _ in CLOSED}


def test_no_route_opens_without_a_token(client: TestClient) -> None:
    for method, path, _ in CLOSED:
        refused(client.request(method, path), 401, "unauthenticated")


def test_no_route_opens_with_every_scope_but_its_own(callers: Callers) -> None:
    for method, path, route in CLOSED:
        others = callers(*(scope for scope in Scope if scope not in needed(route)))
        assert needed(route)[0] in refused(others.request(method, path), 403, "forbidden")


def test_each_of_the_scopes_of_a_route_opens_it(callers: Callers) -> None:
    for method, path, route in CLOSED:
        for scope in needed(route):
            assert callers(scope).request(method, path).status_code not in (401, 403)


def test_an_application_with_a_route_that_names_no_scope_is_not_made() -> None:
    careless = FastAPI(openapi_url=None)
    require_scopes(careless)
    careless.get("/api/secrets")(lambda: "all of them")
    with pytest.raises(RuntimeError, match="/api/secrets does not say which scope it needs"):
        require_scopes(careless)


def test_a_stranger_is_not_even_told_what_is_there(callers: Callers, client: TestClient) -> None:
    caller = callers()
    for path in ("/", "/nothing", "/docs", "/openapi.json", "/healthz/", "/api/tasks/", "//healthz"):
        refused(client.get(path), 401, "unauthenticated")
        refused(caller.get(path), 404, "not_found")


def test_what_is_no_token_of_ours_opens_nothing(client: TestClient) -> None:
    nobody = "celeriac_" + "A" * 43
    for given in ("", "Bearer", "Bearer ", "Basic Y2VsZXJpYWM6eA==", "Bearer x", f"Bearer {nobody}", f"Basic {nobody}"):
        answer = client.get("/api/tasks/1", headers={"Authorization": given})
        refused(answer, 401, "unauthenticated")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_token_is_not_taken_from_the_address(client: TestClient, callers: Callers) -> None:
    token = callers().token
    refused(client.get(f"/api/tasks/1?token={token}&access_token={token}"), 401, "unauthenticated")


def test_two_tokens_at_once_are_none(client: TestClient, callers: Callers) -> None:
    bearer = f"Bearer {callers().token}"
    twice = [("Authorization", bearer), ("Authorization", bearer)]
    refused(client.get("/api/tasks/1", headers=twice), 401, "unauthenticated")


def test_a_token_is_refused_from_the_moment_it_is_revoked(callers: Callers) -> None:
    caller = callers()
    refused(caller.get("/api/tasks/1"), 404, "unknown_task")
    with engine().begin() as connection:
        tokens.revoke(connection, caller.name)
    assert refused(caller.get("/api/tasks/1"), 401, "unauthenticated") == "The token was revoked."


def test_a_token_is_refused_when_its_time_is_over_by_the_ledgers_clock(callers: Callers, stack: ServersOfTests) -> None:
    caller = callers(expires_in=timedelta(days=30))
    refused(caller.get("/api/tasks/1"), 404, "unknown_task")
    with stack.cluster.superuser.begin() as superuser:
        move_clock(superuser, timedelta(days=30))
    assert refused(caller.get("/api/tasks/1"), 401, "unauthenticated") == "The token has expired."


def test_a_websocket_is_closed_before_it_opens(client: TestClient, callers: Callers) -> None:
    headers = {"Authorization": f"Bearer {callers().token}"}
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws/chat", headers=headers):
        raise AssertionError("it opened")


def test_every_answer_forbids_guessing_framing_and_keeping(client: TestClient, callers: Callers) -> None:
    for answer in (client.get("/healthz"), client.get("/nothing"), callers().get("/api/tasks/1"), callers().submit()):
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS


def test_no_token_reaches_a_log(
    client: TestClient, callers: Callers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    caller, unknown = callers(), "celeriac_" + "Z" * 43
    assert caller.submit({"fail": 1}).status_code == 202
    client.get("/api/tasks/1", headers={"Authorization": f"Bearer {unknown}"})
    monkeypatch.setattr(tokens, "LOOK_UP", None)  # and when looking it up fails unexpectedly
    refused(caller.get("/api/tasks/1"), 500, "internal")
    assert "a request failed" in caplog.text
    for secret in (caller.token, unknown):
        assert secret not in caplog.text


def test_the_name_of_a_token_can_be_had_again_and_its_old_secret_stays_refused(callers: Callers) -> None:
    caller = callers(name="ci")
    first = caller.submit({"n": 1}, key="k").json()
    with engine().begin() as connection:
        tokens.revoke(connection, "ci")
    caller.token, old = make_token("ci"), caller.token
    assert caller.submit({"n": 1}, key="k").json() == {**first, "created": False}
    caller.token = old
    refused(caller.get("/api/tasks/1"), 401, "unauthenticated")
