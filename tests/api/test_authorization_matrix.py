"""Every route × every kind of token. A new route is covered by itself, or a test says what it needs.

The requests are those of the examples in the OpenAPI document, so a token with the right scope gets a real answer.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient

from api import tokens
from api.app import app
from api.authorization import OPEN_PATHS, scopes_of
from api.tokens import Scope
from models.engine import engine
from tests.api.callers import Caller, Callers, expect_error
from tests.api.objects import document_of, make, name_what_examples_name, names_in
from tests.api.routes import DOCUMENTED, PROTECTED, ROUTES, valid_request
from tests.models.moving_clock import move_clock
from tests.servers import ServersOfTests

SHARED: Final = frozenset({"queue"})  # parameters whose objects belong to no principal
SEES_ALL: Final = frozenset({Scope.TASKS_READ_ALL, Scope.OPERATE})  # scopes that show objects of all principals
EVERY: Final = [pytest.param(*route, id=f"{route[0]} {route[1]}") for route in PROTECTED]


@pytest.fixture(autouse=True)
def _names_of_examples(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    name_what_examples_name(monkeypatch)


def send(caller: Caller | TestClient, method: str, path: str, *, at: str | None = None) -> Any:
    """Send the example of a route; without an address, about an object that does not exist."""
    request = valid_request(method, path)
    return caller.request(method, at or address(path, lambda _: str(uuid.uuid4())), **request.options)


def address(path: str, object_of: Callable[[str], str]) -> str:
    for name in names_in(path):
        path = path.replace(f"{{{name}}}", object_of(name))
    return path


def address_of(owner: Caller, path: str) -> str:
    """Return the address of a new object of the owner."""
    return address(path, lambda name: make(name, path)(owner))


def test_the_list_of_routes_is_complete() -> None:
    assert len(ROUTES) == len(list(iter_route_contexts(app.routes)))
    assert {path for _, path, _ in ROUTES} > OPEN_PATHS
    assert {"/api/tasks", "/api/workflows/apply", "/api/knowledge/search"} <= {path for _, path, _ in PROTECTED}


def test_open_routes_are_pages_probes_and_public_keys(client: TestClient) -> None:
    for path in OPEN_PATHS:
        assert client.get(path).status_code == 200, path
    open_ones = {path for _, path, _ in DOCUMENTED if path in OPEN_PATHS}
    assert open_ones == {"/healthz", "/readyz", "/metrics", "/.well-known/celeriac-keys.json"}


def test_no_route_answers_without_a_valid_token(client: TestClient, callers: Callers, stack: ServersOfTests) -> None:
    revoked, expired = callers(), callers(expires_in=timedelta(days=1))
    without = [Caller(client, "", token) for token in ("", "x", "celeriac_" + "A" * 43)]
    with engine().begin() as connection:
        tokens.revoke(connection, revoked.name)
    with stack.cluster.superuser.begin() as superuser:
        move_clock(superuser, timedelta(days=2))
    unknown: list[Caller | TestClient] = [client, *without, revoked, expired]
    for method, path, _ in PROTECTED:
        for caller in unknown:
            expect_error(send(caller, method, path), 401, "unauthenticated")


def test_no_route_answers_a_token_that_has_all_scopes_but_the_right_one(callers: Callers) -> None:
    made: dict[tuple[Scope, ...], Caller] = {}
    for method, path, route in PROTECTED:
        right = scopes_of(route)
        others = made.setdefault(right, callers(*(scope for scope in Scope if scope not in right)))
        assert right[0] in expect_error(send(others, method, path), 403, "forbidden")


@pytest.mark.parametrize(("method", "path", "route"), EVERY)
def test_each_declared_scope_opens_its_route(method: str, path: str, route: Any, callers: Callers) -> None:
    for scope in scopes_of(route):
        owner = callers()
        if path == "/api/knowledge/documents":
            document_of(owner)
        at = address_of(owner, path)
        answer = send(narrowed(owner, scope), method, path, at=at)
        assert answer.is_success or answer.status_code == 409, f"{scope}: {answer.text}"


@pytest.mark.parametrize(
    ("method", "path", "route"), [each for each in EVERY if set(names_in(str(each.values[1]))) - SHARED]
)
def test_an_object_of_another_principal_does_not_exist_unless_the_scope_shows_all(
    method: str, path: str, route: Any, callers: Callers
) -> None:
    owner = callers()
    for scope in scopes_of(route):
        answer = send(callers(scope), method, path, at=address_of(owner, path))
        if scope in SEES_ALL:
            assert answer.is_success or answer.status_code == 409, f"{scope}: {answer.text}"
        else:
            assert answer.status_code == 404, f"{scope}: {answer.text}"
            assert owner.name not in answer.text


def narrowed(owner: Caller, scope: Scope) -> Caller:
    """Return the same principal with a token that has one scope only, as after its token was replaced."""
    with engine().begin() as connection:
        tokens.revoke(connection, owner.name)
        replaced, _ = tokens.create(connection, owner.name, scopes=[scope], types=(), expires_in=None)
    return Caller(owner.client, owner.name, replaced)
