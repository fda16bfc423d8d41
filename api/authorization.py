"""The gate: without a token nobody gets past it, whatever address they name. Three addresses are open, for probes.

It looks at headers only, so that a stranger's body is never read. What a token may do once inside is said by each route
(`needs`); an application with a route that says nothing is not even made (`require_scopes`).
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from api import tokens
from api.tokens import Forbidden, Token, Unauthenticated
from models.engine import engine

OPEN: Final = frozenset({"/healthz", "/readyz", "/metrics"})
TOKEN: Final = "celeriac.token"  # noqa: S105 - where the scope of a request keeps it


class Gate:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            scope[TOKEN] = await run_in_threadpool(_known, _given(Headers(scope=scope)))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # there is none yet
            return
        await self.app(scope, receive, send)


class Needs:
    """A dependency of a route: the token, if it has one of these scopes."""

    def __init__(self, *any_of: tokens.Scope) -> None:
        self.any_of = any_of

    async def __call__(self, connection: HTTPConnection) -> Token:
        token: Token = connection.scope[TOKEN]
        if not token.may(*self.any_of):
            raise Forbidden(f"This needs the scope {' or '.join(self.any_of)}, which the token {token.name} lacks.")
        return token


def needs(*any_of: tokens.Scope) -> Any:
    """What every route says: `token: Annotated[Token, needs(…)]`, or `dependencies=[needs(…)]`."""
    return Depends(Needs(*any_of))


def needed(route: APIRoute) -> tuple[tokens.Scope, ...]:
    """The scopes of which a route needs one; none: it has not said."""
    found = (each.call for each in route.dependant.dependencies)
    return next((each.any_of for each in found if isinstance(each, Needs)), ())


def require_scopes(app: FastAPI) -> None:
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if not isinstance(route, APIRoute) or (context.path not in OPEN and not needed(route)):
            raise RuntimeError(f"{context.path} does not say which scope it needs.")


def _given(headers: Headers) -> str:
    kind, _, token = headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or len(headers.getlist("authorization")) != 1:
        raise Unauthenticated
    return token.strip()


def _known(given: str) -> Token:
    return tokens.look_up(engine(), given)
