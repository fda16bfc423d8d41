"""Who may call which route: all but the pages, probes and public keys need a token, and each route names its scopes.

`RequireToken` reads headers only, so the body of a request without a valid token is never read. A route declares its
scopes with `require_scope`; an application with a route that declares none does not start.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from api import keys, pages, tokens
from api.ledger_calls import call_ledger
from api.token_cache import cache
from api.tokens import Forbidden, Token, Unauthenticated
from models.engine import engine

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/metrics", keys.PATH}) | pages.PATHS
ANSWERED_WITHOUT_LEDGER: Final = ("/api/receipts/", "/api/tasks/", "/api/knowledge/tasks/")  # GET
TOKEN: Final = "celeriac.token"  # noqa: S105 - the key of the token in the ASGI scope


class RequireToken:
    """Middleware that rejects every request without a valid token."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scope[TOKEN] = await _authenticate(scope, bearer_token(Headers(scope=scope)))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # `websocket_authorization.py` serves those it admits
            return
        await self.app(scope, receive, send)


async def authenticate_express(secret: str) -> Token:
    """Return the token of a request that must be answered while the ledger is down, if it was checked lately."""
    return await cache.authenticate(secret)


async def _authenticate(scope: Scope, secret: str) -> Token:
    """Return the token. What must work while the ledger is down may use one that was checked lately."""
    if scope["method"] == "POST" and _wants_accepted(scope["query_string"]):
        return await authenticate_express(secret)
    if scope["method"] == "GET" and scope["path"].startswith(ANSWERED_WITHOUT_LEDGER):
        return await cache.authenticate(secret, prefers_ledger=True)
    return await call_ledger(lambda: tokens.authenticate(engine(), secret))


def _wants_accepted(query: bytes) -> bool:
    return b"receipt=accepted" in query.split(b"&")


class RequireScope:
    """Dependency of a route: return the token if it has one of the scopes."""

    def __init__(self, *any_of: tokens.Scope) -> None:
        self.any_of = any_of

    async def __call__(self, connection: HTTPConnection) -> Token:
        token: Token = connection.scope[TOKEN]
        if not token.has_scope(*self.any_of):
            raise Forbidden(f"The token {token.name} lacks the scope {' or '.join(self.any_of)}.")
        return token


def require_scope(*any_of: tokens.Scope) -> Any:
    """Declare that a route needs one of the scopes: `token: Annotated[Token, require_scope(…)]`."""
    return Depends(RequireScope(*any_of))


def scopes_of(route: APIRoute) -> tuple[tokens.Scope, ...]:
    """Return the scopes of which a route needs one; empty if it declares none."""
    found = (each.call for each in route.dependant.dependencies)
    return next((each.any_of for each in found if isinstance(each, RequireScope)), ())


def require_scopes_on_all_routes(app: FastAPI) -> None:
    """Raise if a route that is not open declares no scope."""
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if not isinstance(route, APIRoute) or (context.path not in OPEN_PATHS and not scopes_of(route)):
            raise RuntimeError(f"The route {context.path} declares no scope.")


def bearer_token(headers: Headers) -> str:
    kind, _, secret = headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or len(headers.getlist("authorization")) != 1:
        raise Unauthenticated
    return secret.strip()
